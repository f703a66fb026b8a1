"""The pictures of the documentation, each from a description of boxes and arrows.

::

    python docs/pictures.py            # write docs/pictures/*.svg
    python docs/pictures.py --check    # exit with 1 where a file is not what this script makes

A picture has no background, and its colours have about the same contrast with white and with black: it is read on light
and on dark pages. The output is a function of this file alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from html import escape
from math import atan2, cos, radians, sin
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["FOLDER", "PICTURES", "main", "svg"]

FOLDER: Final = Path(__file__).resolve().parent / "pictures"

Colour = Literal["plain", "frames", "arrays", "starts"]
COLOURS: Final[Mapping[str, str]] = {
    "plain": "#7b8088",
    "frames": "#3f87d0",
    "arrays": "#cc7a29",
    "starts": "#7b8088",
}
"""Grey for what stands still or starts something, blue for frames, orange for the bytes of arrays."""
TEXT: Final = "#7b8088"
FONT: Final = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
SIZE, SMALL, LINE = 14, 12, 17
"""Pixels: of titles, of other text, and from line to line."""
HEAD_LENGTH, HEAD_ANGLE = 9, radians(24)
"""The size of arrows' heads: pixels along the edge, and the angle between edge and shaft."""

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and lines of text from its top down."""

    x: float
    y: float
    width: float
    height: float
    title: str = ""
    lines: Sequence[str] = ()
    colour: Colour = "plain"
    dashed: bool = False
    """A host, and no process or memory."""
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Arrow:
    """Straight pieces from point to point, with a head at the end."""

    points: Sequence[Point]
    label: Sequence[str] = ()
    colour: Colour = "plain"
    both: bool = False
    """A head at the beginning, too."""
    dashed: bool = False
    at: Point | None = None
    """The place of the label's first line; None: centred above the first piece."""
    head: bool = True


@dataclass(frozen=True, slots=True)
class Text:
    """Lines of text that belong to no box."""

    x: float
    y: float
    lines: Sequence[str]
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes, arrows and texts, in pixels; the description is for readers who do not see them."""

    width: int
    height: int
    description: str
    items: Sequence[Box | Arrow | Text] = field(default_factory=tuple)


# ---- how it is drawn


def number(value: float) -> str:
    """At most one decimal, without a trailing zero."""
    return f"{value:.1f}".removesuffix(".0")


def words(x: float, y: float, text: str, *, size: int = SMALL, anchor: str = "start", bold: bool = False) -> str:
    """One line of text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{size}" text-anchor="{anchor}" fill="{TEXT}"{weight}>'
        f"{escape(text, quote=False)}</text>"
    )


def box(item: Box) -> list[str]:
    """A rectangle and its text."""
    colour = COLOURS[item.colour]
    dash = ' stroke-dasharray="5 5"' if item.dashed else ""
    fill = f'fill="{colour}" fill-opacity="0.15"' if item.filled else 'fill="none"'
    radius = 10 if item.dashed else 5
    lines = [
        f'<rect x="{number(item.x)}" y="{number(item.y)}" width="{number(item.width)}" height="{number(item.height)}" '
        f'rx="{radius}" {fill} stroke="{colour}" stroke-width="1.5"{dash}/>'
    ]
    y = item.y + 20
    if item.title:
        lines.append(words(item.x + 10, y, item.title, size=SIZE, bold=True))
        y += LINE
    return lines + [words(item.x + 10, y + LINE * place, line) for place, line in enumerate(item.lines)]


def head(tip: Point, behind: Point, colour: str) -> str:
    """The triangle at the end of an arrow that comes from `behind`."""
    angle = atan2(behind[1] - tip[1], behind[0] - tip[0])
    corners = [
        (tip[0] + HEAD_LENGTH * cos(angle + turn), tip[1] + HEAD_LENGTH * sin(angle + turn))
        for turn in (HEAD_ANGLE, -HEAD_ANGLE)
    ]
    points = " ".join(f"{number(x)},{number(y)}" for x, y in (tip, *corners))
    return f'<polygon points="{points}" fill="{colour}"/>'


def arrow(item: Arrow) -> list[str]:
    """Pieces, heads and label."""
    colour = COLOURS[item.colour]
    dash = ' stroke-dasharray="4 4"' if item.dashed else ""
    points = " ".join(f"{number(x)},{number(y)}" for x, y in item.points)
    lines = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>']
    if item.head:
        lines.append(head(item.points[-1], item.points[-2], colour))
    if item.both:
        lines.append(head(item.points[0], item.points[1], colour))
    if item.at is not None:
        return lines + [words(item.at[0], item.at[1] + LINE * n, line) for n, line in enumerate(item.label)]
    (x1, y1), (x2, y2) = item.points[:2]
    top = (y1 + y2) / 2 - 7 - LINE * (len(item.label) - 1)
    return lines + [words((x1 + x2) / 2, top + LINE * n, line, anchor="middle") for n, line in enumerate(item.label)]


def svg(picture: Picture) -> str:
    """The whole file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width}" height="{picture.height}" '
        f'viewBox="0 0 {picture.width} {picture.height}" role="img" font-family="{escape(FONT)}">',
        f"<title>{escape(picture.description, quote=False)}</title>",
    ]
    for item in picture.items:
        if isinstance(item, Box):
            lines += box(item)
        elif isinstance(item, Arrow):
            lines += arrow(item)
        else:
            lines += [
                words(
                    item.x,
                    item.y + LINE * n,
                    line,
                    anchor=item.anchor,
                    bold=item.bold,
                    size=SIZE if item.bold else SMALL,
                )
                for n, line in enumerate(item.lines)
            ]
    return "\n".join([*lines, "</svg>", ""])


# ---- what is drawn


def process(x: float, y: float, title: str, *lines: str) -> list[Box]:
    """A process with its arena."""
    return [
        Box(x, y, 180, 108, title, lines),
        Box(x + 10, y + 74, 160, 26, "", ["arena"], "arrays", filled=True),
    ]


def processes() -> Picture:
    """Processes, how each is started, and the two planes between them."""
    items: list[Box | Arrow | Text] = [
        Box(8, 8, 584, 404, "host A", (), dashed=True),
        Box(684, 8, 228, 404, "host B", (), dashed=True),
        *process(32, 46, "driver", "your program"),
        *process(388, 46, "worker", "an actor, its thread"),
        *process(388, 286, "worker", "an actor, its thread"),
        *process(708, 46, "worker", "an actor, its thread"),
        Box(32, 206, 180, 62, "node agent, head", ["actors, names, resources"]),
        Box(32, 328, 180, 62, "zygote", ["forks workers"]),
        Box(708, 206, 180, 62, "node agent", ["starts and ends workers"]),
        Box(708, 328, 180, 62, "zygote"),
        Arrow([(122, 154), (122, 206)], ["starts"], "starts", at=(130, 185), dashed=True),
        Arrow([(122, 268), (122, 328)], ["forks once"], "starts", at=(130, 303), dashed=True),
        Arrow([(212, 350), (388, 350)], ["forks"], "starts", dashed=True),
        Arrow([(212, 340), (262, 340), (262, 128), (388, 128)], [], "starts", dashed=True),
        Arrow([(798, 268), (798, 328)], ["forks once"], "starts", at=(806, 303), dashed=True),
        Arrow([(888, 350), (902, 350), (902, 90), (888, 90)], [], "starts", dashed=True),
        Arrow([(212, 237), (708, 237)], [], "starts", both=True, dashed=True),
        Text(600, 256, ["joins, reports"]),
        Arrow([(212, 70), (388, 70)], ["frames"], "frames", both=True),
        Arrow([(388, 105), (212, 132)], ["maps"], "arrays", at=(282, 106)),
        Arrow([(440, 154), (440, 286)], ["frames"], "frames", both=True, at=(390, 190)),
        Arrow([(520, 286), (520, 154)], ["maps"], "arrays", at=(528, 190)),
        Arrow([(568, 70), (708, 70)], ["frames"], "frames", both=True),
        Arrow([(708, 132), (568, 132)], ["READ or TCP"], "arrays"),
        Arrow([(24, 440), (64, 440)], ["frames: calls, answers, references"], "frames", both=True, at=(74, 444)),
        Arrow([(320, 440), (360, 440)], ["arrays: mapped, or pulled by the reader"], "arrays", at=(370, 444)),
        Arrow([(652, 440), (692, 440)], ["starts and supervises"], "starts", dashed=True, at=(702, 444)),
    ]
    return Picture(
        920,
        460,
        "A driver, a node agent, a zygote and workers on one host, and an agent, a zygote and a worker on another. "
        "Frames go between driver and workers. Arrays are mapped on one host, and pulled between hosts.",
        items,
    )


def call() -> Picture:
    """One call with an array, from the call to the release of the result."""
    caller, loop, thread = 150, 510, 800
    notes = [
        (caller, Box(20, 58, 260, 62, "", ["ref = handle.push(x)", "x is sealed, a lease on it granted"])),
        (loop, Box(400, 166, 220, 45, "", ["mailbox: the call waits its turn"])),
        (
            thread,
            Box(
                680, 252, 240, 79, "", ["x is an array over a lease", "push(x) runs", "its result is born in the store"]
            ),
        ),
        (caller, Box(20, 378, 260, 62, "", ["value = await ref", "an array over a lease on the result"])),
        (caller, Box(20, 452, 260, 30, "", ["del value: the lease ends"])),
        (loop, Box(400, 526, 220, 30, "", ["the memory is free"])),
    ]
    items: list[Box | Arrow | Text] = [
        Box(60, 8, 180, 32, "caller"),
        Box(420, 8, 180, 32, "actor's event loop"),
        Box(710, 8, 180, 32, "actor's thread"),
        *(replace(note, height=12 + LINE * len(note.lines), filled=True) for _, note in notes),
    ]
    for x in (caller, loop, thread):
        top = 40.0
        for end, following in [(n.y, n.y + 12 + LINE * len(n.lines)) for lane, n in notes if lane == x] + [(560, 560)]:
            items.append(Arrow([(x, top), (x, end)], [], "plain", dashed=True, head=False))
            top = following
    items += [
        Arrow([(caller, 150), (loop, 150)], ["CALL: method, reference to x"], "frames"),
        Arrow([(loop, 236), (thread, 236)], ["begins"], "plain"),
        Arrow(
            [(680, 292), (caller, 292)],
            ["the bytes of x: mapped, or pulled on arrival"],
            "arrays",
            dashed=True,
            at=(170, 285),
        ),
        Arrow(
            [(thread, 356), (caller, 356)], ["RESPONSE: reference to the result, releases x"], "frames", at=(170, 349)
        ),
        Arrow([(caller, 510), (loop, 510)], ["RELEASE, with the next frame"], "frames"),
    ]
    return Picture(
        930,
        566,
        "The caller sends a CALL with a reference. The actor's process queues it, its thread runs the method on an "
        "array over the caller's memory and answers by a RESPONSE with a reference to the result. A RELEASE frees it.",
        items,
    )


def array() -> Picture:
    """The three ways of an array's bytes to a reader."""
    items: list[Box | Arrow | Text] = [
        Box(8, 8, 400, 352, "one host", (), dashed=True),
        Box(590, 8, 262, 150, "a host with RDMA", (), dashed=True),
        Box(590, 210, 262, 150, "any other host", (), dashed=True),
        Box(24, 44, 368, 130, "owner", ["its arena is registered", "with the network card"]),
        Box(220, 80, 150, 78, "the array", (), "arrays", filled=True),
        Box(24, 258, 368, 86, "reader", ["maps the owner's arena, read-only", "an array over the owner's memory"]),
        Arrow([(295, 258), (295, 158)], ["mapped in place:", "nothing moves"], "arrays", dashed=True, at=(175, 210)),
        Box(606, 44, 230, 98, "reader", ["a copy in its own arena"]),
        Box(616, 104, 110, 28, "", ["the bytes"], "arrays", filled=True),
        Arrow([(370, 118), (616, 118)], ["RDMA READ:", "no processor touches it"], "arrays", at=(424, 92)),
        Box(606, 246, 230, 98, "reader", ["a copy in its own arena"]),
        Box(616, 306, 110, 28, "", ["the bytes"], "arrays", filled=True),
        Arrow(
            [(345, 158), (345, 216), (480, 216), (480, 320), (616, 320)],
            ["TCP: received", "in place"],
            "arrays",
            at=(424, 192),
        ),
    ]
    return Picture(
        860,
        368,
        "A reader on the owner's host maps the array. A reader on a host with RDMA reads it into its own arena. A "
        "reader on any other host receives it over TCP into its own arena.",
        items,
    )


def lease() -> Picture:
    """From the making of an array to the use of its memory for another one."""
    items: list[Box | Arrow | Text] = [
        Box(10, 40, 170, 80, "array", ["in the owner's store,", "writable"], "arrays", filled=True),
        Box(
            270,
            40,
            190,
            80,
            "sealed and leased",
            ["read-only; the owner's", "table keeps the bytes"],
            "arrays",
            filled=True,
        ),
        Box(560, 40, 170, 80, "read", ["an array over a lease", "in the reader"], "arrays", filled=True),
        Box(820, 40, 150, 80, "free", ["for the next array"]),
        Arrow([(180, 80), (270, 80)], ["passed"], "frames"),
        Arrow([(460, 80), (560, 80)], ["frame"], "frames"),
        Arrow([(730, 80), (820, 80)], ["RELEASE"], "frames"),
        Text(775, 140, ["the last array over", "it is gone, in the", "owner too"], "middle"),
        Box(270, 220, 190, 80, "parked", ["the connection ended,", "the reader may read on"]),
        Box(
            560, 220, 190, 80, "adopted", ["the owner has ended: the", "reader copies the pages"], "arrays", filled=True
        ),
        Arrow([(600, 120), (600, 170), (365, 170), (365, 220)], ["connection lost"], "plain", at=(400, 163)),
        Arrow([(660, 120), (660, 220)], ["owner's process ends"], "plain", at=(668, 206)),
        Arrow([(460, 276), (510, 276), (510, 330), (895, 330), (895, 120)], [], "plain"),
        Text(520, 348, ["the reader's process is gone, or says that it holds nothing"]),
        Arrow([(750, 260), (860, 260), (860, 120)], ["dropped"], "plain", at=(770, 253)),
        Text(10, 220, ["Never by a timer,", "never by a delete."]),
    ]
    return Picture(
        980,
        370,
        "An array is sealed and leased when it is passed, read under a lease, and free after the release. If the "
        "connection ends the lease is parked until the reader is gone. If the owner ends the reader adopts the pages.",
        items,
    )


PICTURES: Final[Mapping[str, Callable[[], Picture]]] = {
    "processes": processes,
    "call": call,
    "array": array,
    "lease": lease,
}
"""The pictures by the names of their files, without the suffix."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pictures, or compare them with what is there.

    Returns:
        0; with ``--check`` 1 where a file differs or is missing.
    """
    parser = argparse.ArgumentParser(prog="python docs/pictures.py", description="Draw the pictures of the pages.")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args(arguments)
    stale = []
    for name, draw in PICTURES.items():
        path: Path = options.out / f"{name}.svg"
        text = svg(draw())
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path)
    for path in stale:
        print(f"{path} is not what this script makes; run: python docs/pictures.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
