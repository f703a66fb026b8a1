"""The pictures of the documentation, each from a description of boxes and arrows, and what is drawn of benchmarks.

::

    python docs/pictures.py            # write docs/pictures/*.svg, and the tables in docs/performance.md
    python docs/pictures.py --check    # exit with 1 where a file is not what this script makes

A picture has no background, and its colours have about the same contrast with white and with black: it is read on light
and on dark pages. The output is a function of this file and of the records in ``docs/figures``, which
``python -m benchmarks --markdown`` and ``python -m benchmarks peers --json`` write.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from math import atan2, cos, radians, sin
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["FOLDER", "PICTURES", "main", "svg"]

DOCS: Final = Path(__file__).resolve().parent
FOLDER: Final = DOCS / "pictures"
FIGURES: Final = DOCS / "figures"
PAGE: Final = DOCS / "performance.md"

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


def memory() -> Picture:
    """Three processes and one array, for readers who see zcactor for the first time; narrow, for telephones too."""
    items: list[Box | Arrow | Text] = [
        Box(8, 8, 130, 62, "your program", ["its own process"]),
        Box(178, 8, 130, 62, "an actor", ["its own process"]),
        Box(348, 8, 130, 62, "another actor", ["its own process"]),
        Arrow([(138, 39), (178, 39)], ["call"], "frames", at=(147, 32)),
        Arrow([(308, 39), (348, 39)], ["call"], "frames", at=(317, 32)),
        Box(8, 130, 470, 90),
        Text(243, 210, ["shared memory"], "middle", bold=True),
        Box(178, 146, 130, 36, "", ["the array, once"], "arrays", filled=True),
        Arrow([(178, 164), (73, 164), (73, 70)], ["mapped"], "arrays", dashed=True, at=(81, 105)),
        Arrow([(243, 146), (243, 70)], ["mapped"], "arrays", dashed=True, at=(251, 105)),
        Arrow([(308, 164), (413, 164), (413, 70)], ["mapped"], "arrays", dashed=True, at=(421, 105)),
    ]
    return Picture(
        486,
        228,
        "Your program calls an actor, and this one calls another. Each is a process. All three map one array, which "
        "lies in shared memory once.",
        items,
    )


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


# ---- what was measured


class Record:
    """The figures of one run of a command.

    Args:
        path: the file: a line with the machine and the command, and a line for each measurement.
    """

    def __init__(self, path: Path) -> None:
        self.about, *lines = map(json.loads, path.read_text().splitlines())
        self._found: dict[tuple[str, str], dict[str, Any]] = {(line["item"], line["name"]): line for line in lines}

    def bar(self, item: str, name: str, label: str = "", *, ours: bool = True) -> Bar:
        """The value of a measurement."""
        line = self._found[item, name]
        return Bar(label, line["value"], line["unit"], ours)

    def floor(self, item: str, name: str, label: str) -> Bar:
        """The figure that a measurement stands beside."""
        line = self._found[item, name]
        return Bar(label, line["floor"], line["unit"], ours=False)

    def rows(self) -> dict[str, list[Bar]]:
        """The figures of all libraries that `benchmarks.peers` has measured, row by row."""
        found: dict[str, list[Bar]] = {}
        for item, name in self._found:
            row, library = name.rsplit(": ", 1)
            found.setdefault(row, []).append(self.bar(item, name, library, ours=library == "zcactor"))
        return found

    def told(self) -> str:
        """The machine, the moment and the command, as a sentence."""
        machine = self.about["machine"]
        return (
            f"Measured by `{self.about['command']}` on {machine['date']}: {machine['cpu']}, "
            f"{machine['cores']} cores, {machine['memory'] / 2**30:.1f} GiB, Linux {machine['kernel']}, "
            f"Python {machine['python']}, commit {machine['commit']}; load before it began "
            f"{', '.join(map(str, machine['load']))}."
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure with its name."""

    label: str
    value: float
    unit: str
    ours: bool

    def text(self) -> str:
        """The figure with its unit."""
        return quantity(self.value, self.unit)


LEFT, LONGEST, THICK, STEP = 210, 380, 18, 24
"""Pixels: where bars begin, the longest, their height, and from one to the next."""


def bars(description: str, groups: Mapping[str, Sequence[Bar]]) -> Picture:
    """Bars in groups; the longest of each group has the same length."""
    items: list[Box | Arrow | Text] = []
    y = 4
    for title, group in groups.items():
        items.append(Text(8, y + 14, [title], bold=True))
        y += STEP
        most = max(bar.value for bar in group)
        for bar in group:
            width = max(2.0, LONGEST * bar.value / most)
            items += [
                Text(LEFT - 8, y + 13, [bar.label], "end"),
                Box(LEFT, y, width, THICK, colour="arrays" if bar.ours else "plain", filled=True),
                Text(LEFT + width + 8, y + 13, [bar.text()]),
            ]
            y += STEP
        y += 10
    return Picture(LEFT + LONGEST + 130, y, description, items)


BUDGETS: Final = Record(FIGURES / "budgets.jsonl")
PEERS: Final = FIGURES / "peers.jsonl"
WAYS: Final = {"zero copy": "zcactor", "private buffers": "copied through buffers", "encode": "pickled"}
"""The ways of `benchmarks.thesis`, and their names for users."""


def ways(item: str, medium: str, what: str) -> list[Bar]:
    """The figures of each way of an array, or of a step, over a medium; each way stands beside the next slower one."""
    ours, copied, pickled = WAYS.values()
    return [
        BUDGETS.bar(item, f"{medium}, {what}, zero copy", ours),
        BUDGETS.bar(item, f"{medium}, {what}, private buffers", copied, ours=False),
        BUDGETS.floor(item, f"{medium}, {what}, private buffers", pickled),
    ]


def transfers(item: str, medium: str, where: str) -> Picture:
    """Arrays of several sizes, each to another process."""
    sizes = ("1 MiB", "16 MiB", "64 MiB")
    return bars(
        f"Time of an array of float32 {where}: by zcactor, copied through buffers, and pickled. Shorter is better.",
        {f"{size} {where}": ways(item, medium, size) for size in sizes},
    )


def steps() -> Picture:
    """A step of a parameter server."""
    media = {
        "on one host": ("thesis", "local"), "over the loopback device": ("thesis", "tcp"),
        "between two hosts": ("thesis-hosts", "veth"),
    }  # fmt: skip
    return bars(
        "Time of a step of a parameter server with the layers of Inception: gradients go, parameters come back.",
        {f"a step {where}": ways(*place, "Inception step") for where, place in media.items()},
    )


def calls() -> Picture:
    """Calls, one at a time and many at once."""
    kinds = {"inline": "inline method", "async": "async method", "sync": "plain method"}
    alone = [BUDGETS.bar("echo", f"{kind} method, one core", label) for kind, label in kinds.items()]
    many = [BUDGETS.bar("echo", f"{kind} method, 1,000 in flight", label) for kind, label in kinds.items()]
    return bars(
        "Microseconds of a call, and calls a second with 1,000 in flight, beside an echo of as many bytes.",
        {
            "one call at a time: shorter is better": [
                *alone, BUDGETS.floor("echo", "sync method, one core", "echo over a unix socket")
            ],
            "1,000 in flight: longer is better": [
                *many, BUDGETS.floor("echo", "sync method, 1,000 in flight", "echo of frames")
            ],
        },
    )  # fmt: skip


def actors() -> Picture:
    """Starts and memory."""
    starts = ("import zcactor", "zc.init()", "first spawn", "20th spawn")
    idle = ("idle actor, alone", "idle actor, one of 20")
    memory = [BUDGETS.bar("memory", name, name) for name in idle]
    return bars(
        "Milliseconds of import, start and spawns, and the memory of an idle actor beside a forked Python with NumPy.",
        {
            "start": [BUDGETS.bar("startup", name, name) for name in starts],
            "memory": [*memory, BUDGETS.floor("memory", idle[0], "forked Python with NumPy")],
        },
    )


def peers() -> Picture:
    """The rows of `benchmarks.peers`."""
    rows = Record(PEERS).rows()
    return bars(f"zcactor beside other libraries: {', '.join(rows)}.", rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---:") -> list[str]:
    """A table in Markdown, all but the first of whose columns are aligned so."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---", *[align] * (len(head) - 1)], *rows)]


def tables() -> dict[str, list[str]]:
    """The tables of the page for users, by the names of their places."""
    beside = [
        [f"array of {size} to another process", *(bar.text() for bar in ways("thesis", "local", size))]
        for size in ("1 MiB", "16 MiB", "64 MiB")
    ]
    beside += [
        ["step of a parameter server", *(bar.text() for bar in ways("thesis", "local", "Inception step"))],
        ["copies of each byte", *(BUDGETS.bar("thesis", f"local, {way}: copies of each byte").text() for way in WAYS)],
    ]

    def of(item: str, name: str) -> str:
        return BUDGETS.bar(item, name).text()

    growth = [
        ["a call's argument", f"two numbers: {BUDGETS.floor('arrays', '1 GiB born in the store', '').text()}",
         f"1 GiB born in the store: {of('arrays', '1 GiB born in the store')}"],
        ["calls in flight", f"1: {of('echo', 'async method, one core')} each",
         f"1,000: {quantity(1e6 / BUDGETS.bar('echo', 'async method, 1,000 in flight').value, 'us')} each"],
        ["actors with a process each", f"1: {of('memory', 'idle actor, alone')}",
         f"20: {of('memory', 'idle actor, one of 20')} each"],
        ["actors that share processes", f"1,000: {of('memory', 'idle shared actor, one of 1,000')} each",
         f"10,000: spawned and called in {of('scale', '10,000 shared actors, spawned and called once')}"],
        ["hosts that read an array of 256 MiB", "1: it leaves its owner once",
         f"8: it leaves its owner {of('broadcast', '256 MiB to 8 hosts: leaves the owner').split()[0]} times"],
    ]  # fmt: skip
    found = {
        "beside": [*table(["on one host", *WAYS.values()], beside), "", BUDGETS.told()],
        "growth": table(["what grows", "from", "to"], growth, "---"),
        "peers": ["No figures of these are recorded yet: they count only where the machine does nothing else."],
    }
    if PEERS.exists():
        record = Record(PEERS)
        rows = record.rows()
        libraries = dict.fromkeys(bar.label for group in rows.values() for bar in group)
        cells = [
            [row, *({bar.label: bar.text() for bar in group}.get(library, "") for library in libraries)]
            for row, group in rows.items()
        ]
        picture = "![Bars: zcactor beside other libraries](pictures/figures-peers.svg)"
        found["peers"] = [*table(["", *libraries], cells), "", record.told(), "", picture]
    return found


def page(text: str) -> str:
    """The page for users with its tables as they have to be.

    Raises:
        ValueError: the page has no place for one of them.
    """
    for name, lines in tables().items():
        begin, end = f"<!-- {name}: python docs/pictures.py -->", f"<!-- end of {name} -->"
        at, until = text.index(begin) + len(begin), text.index(end)
        text = "\n".join([text[:at], *lines, text[until:]])
    return text


PICTURES: Final[Mapping[str, Callable[[], Picture]]] = {
    "memory": memory,
    "processes": processes,
    "call": call,
    "array": array,
    "lease": lease,
    "figures-arrays": partial(transfers, "thesis", "local", "on one host"),
    "figures-hosts": partial(transfers, "thesis-hosts", "veth", "between two hosts"),
    "figures-steps": steps,
    "figures-calls": calls,
    "figures-actors": actors,
    **({"figures-peers": peers} if PEERS.exists() else {}),
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
    made: dict[Path, str] = {options.out / f"{name}.svg": svg(draw()) for name, draw in PICTURES.items()}
    if options.out == FOLDER:
        made[PAGE] = page(PAGE.read_text())
    for path, text in made.items():
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path)
    for path in stale:
        print(f"{path} is not what this script makes; run: python docs/pictures.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
