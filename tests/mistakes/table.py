"""The mistakes that newcomers make, each as a small program, with the first and the last line that it must print."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MISTAKES", "Mistake"]

TRACEBACK = "Traceback (most recent call last):"

HEAD = """
import asyncio, os, socket, sys, threading, time
import numpy as np
import zcactor as zc

@zc.actor
class A:
    def add(self, a, b):
        return a + b
    def same(self, x):
        return x
    def boom(self):
        raise ValueError("bad thing")
    def inc(self, x):
        x += 1
        return x
    def total(self, xs):
        return xs[0].sum()
    def lock(self):
        return {"lock": threading.Lock()}
    def count(self, n):
        yield from range(n)
    def gen(self):
        yield 1
        raise RuntimeError("camera unplugged")
    def end(self):
        os._exit(3)
    def die(self):
        os.kill(os.getpid(), 9)
    def stop_here(self):
        breakpoint()
        return 1
    def nap(self):
        time.sleep(2)  # the mistake: no return to the caller for twice `warn_after`, which a slow start stays below
    async def block(self):
        time.sleep(2)  # the mistake: no return to the loop
"""

MAIN = """
async def main():
    async with zc.init({settings}):
        a = await A.spawn()
{body}

zc.run(main())
"""


@dataclass(frozen=True)
class Mistake:
    """One mistake: the program, and what it must print. A ``*`` in a line stands for any text."""

    name: str
    program: str
    """All after the imports and the class; or, in `inside`, the lines after ``a = await A.spawn()``."""
    last: str
    first: str = TRACEBACK
    lines: int = 12
    """Lines that the program prints, at most."""
    says: str = "*"
    """A line among them."""


def inside(
    name: str, body: str, last: str, first: str = TRACEBACK, lines: int = 12, settings: str = "",
    says: str = "*",
) -> Mistake:  # fmt: skip
    """The mistake of lines that follow ``a = await A.spawn()``."""
    indented = "\n".join(f"        {line}" for line in body.strip("\n").split("\n"))
    return Mistake(name, MAIN.format(body=indented, settings=settings), last, first, lines, says)


PROMISE = "this is the promise of A.add, not its result: await it, or use .result() in a plain method or a thread"
STREAM = "TypeError: this is the stream of A.count: iterate it by 'async for item in ...', or take the next item by *"
LOCK = "cannot be sent: it is of type _thread.lock (cannot pickle '_thread.lock' object); it belongs to this process: *"
FILE = "cannot be sent: it is an open file *; open it in the process that uses it, and pass its path"
INIT = "zc.init() has started nothing yet: write 'with zc.init():' or 'zc.init().result()' in a plain script, and *"
NOT_RUNNING = "zcactor.errors.NotInitialized: zcactor is not running in this process: wrap the program in 'async with *"

MISTAKES = [
    # ------------------------------------------------------------ a reference, a stream or a spawn that is not awaited
    inside("forgot_await", "y = a.add(1, 2)\nprint(y + 1)", f"TypeError: {PROMISE}"),
    inside("forgot_await_in_if", "if a.add(1, -1):\n    print('true')", f"TypeError: {PROMISE}"),
    inside("forgot_await_in_loop", "for x in a.add([1], [2]):\n    print(x)", f"TypeError: {PROMISE}"),
    inside("forgot_await_then_index", "print(a.add([1], [2])[0])", f"TypeError: {PROMISE}"),
    inside("forgot_await_then_len", "print(len(a.add([1], [2])))", f"TypeError: {PROMISE}"),
    inside(
        "forgot_await_then_attribute", "a.add(np.ones(3), 1).sum()", f"AttributeError: no attribute 'sum': {PROMISE}"
    ),
    inside("forgot_await_then_format", "print(f'{a.add(1, 2):.3f}')", f"TypeError: {PROMISE}"),
    inside("forgot_await_then_numpy", "print(np.mean(a.add(np.ones(3), 1)))", f"TypeError: {PROMISE}", lines=13),
    inside(
        "references_in_a_list",
        "await a.total([a.add(1, 2)])",
        f"AttributeError: no attribute 'sum': {PROMISE}",
    ),
    inside(
        "loop_over_stream",
        "for x in a.count(3):\n    print(x)",
        "RuntimeError: 'for item in' the stream of A.count would block the event loop *: write 'async for item in *",
    ),
    inside("await_a_stream", "print(await a.count(3))", STREAM),
    inside(
        "spawn_not_awaited",
        "b = A.spawn()\nprint(await b.add(1, 2))",
        "AttributeError: no attribute 'add': this is a spawn that was not awaited, not a handle: write *",
    ),
    Mistake(
        "spawn_without_result",
        "with zc.init():\n    b = A.spawn()\n    b.add(1, 2)",
        "AttributeError: no attribute 'add': this is a spawn that was not awaited, not a handle: * or 'handle = *",
    ),
    Mistake(
        "script_without_result",
        "with zc.init():\n    b = A.spawn().result()\n    print(b.add(1, 2) + 1)",
        f"TypeError: {PROMISE}",
    ),
    Mistake(
        "await_in_a_blocking_program",
        "async def main():\n    a = A.spawn().result()\nwith zc.init():\n    asyncio.run(main())",
        "RuntimeError: result() of A.spawn would block the event loop *: await the operation instead",
        lines=16,
    ),
    Mistake(
        "init_not_awaited",
        "async def main():\n    zc.init()\n    a = await A.spawn()\nzc.run(main())",
        NOT_RUNNING,
        f"*init_not_awaited.py:*: RuntimeWarning: {INIT}",
    ),
    inside(
        "result_on_the_loop",
        "print(a.add(1, 2).result())",
        "RuntimeError: result() of A.add would block the event loop *",
    ),
    inside(
        "failure_never_awaited",
        "a.boom()",
        "A.boom failed and its result was never awaited: ValueError: bad thing",
        "A.boom*",
    ),
    # ------------------------------------------------------------ how a program is run
    Mistake("forgot_init", "async def main():\n    a = await A.spawn()\nzc.run(main())", NOT_RUNNING),
    Mistake(
        "plain_with",
        "async def main():\n    with zc.init():\n        pass\nzc.run(main())",
        "RuntimeError: 'with zc.init():' would block the event loop *: write 'async with zc.init():' instead",
    ),
    Mistake(
        "main_not_called",
        "async def main():\n    pass\nzc.run(main)",
        "TypeError: zc.run takes the coroutine *, and got the function itself: call it, zc.run(main())",
    ),
    Mistake(
        "plain_main",
        "def main():\n    zc.init()\nzc.run(main())",
        "TypeError: zc.run takes the coroutine that an async function makes, * define it by 'async def main():'",
        f"*plain_main.py:*: RuntimeWarning: {INIT}",
    ),
    inside(
        "two_inits", "await zc.init()", "zcactor.errors.AlreadyInitialized: * go on with that, without zc.init(); *"
    ),
    inside(
        "run_inside", "zc.run(main())", "RuntimeError: zc.run starts an event loop of its own, *; await main() instead"
    ),
    Mistake(
        "prompt",
        "print(repr(zc.init()), flush=True)",
        "<zc.init() has started nothing yet: *",
        f"*prompt.py:*: RuntimeWarning: {INIT}",
    ),
    Mistake(
        "after_the_end",
        "async def main():\n    async with zc.init():\n        a = await A.spawn()\n    await a.add(1, 2)\n"
        "zc.run(main())",
        "zcactor.errors.ActorDied: actor A(*) died: *; the call did not run",
    ),
    # ------------------------------------------------------------ the class and the handle
    inside(
        "made_by_call",
        "b = A()\nprint(await b.add(1, 2))",
        "'b' is an object of this process, made by A(...): 'await A.spawn(...)' makes an actor, *",
    ),
    inside(
        "method_of_the_class",
        "print(await A.add(1, 2))",
        "A is the class: 'handle = await A.spawn(...)' makes an actor, which has the method",
    ),
    Mistake(
        "no_decorator",
        "class B:\n    pass\nasync def main():\n    async with zc.init():\n        await B.spawn()\nzc.run(main())",
        "B is no actor class: write @zc.actor above it, or 'await zc.spawn(B, ...)'",
    ),
    inside("too_few_arguments", "a.add(1)", "TypeError: A.add(): missing a required argument: 'b'"),
    inside("too_many_arguments", "a.add(1, 2, 3)", "TypeError: A.add(): too many positional arguments"),
    inside("typo_in_a_method", "a.ad(1, 2)", "AttributeError: actor A has no method 'ad' (*methods are: add, *"),
    inside(
        "attribute_read", "print(a.n)", "AttributeError: actor A has no method 'n' (attributes are not reachable, *"
    ),
    inside(
        "attribute_set",
        "a.n = 5",
        "AttributeError: A(*) is a handle: attributes of the actor cannot be set from outside, *",
    ),
    inside("private_method", "a._add(1)", "AttributeError: A._add is private: *"),
    # ------------------------------------------------------------ options and settings
    inside(
        "typo_in_an_option",
        "A.options(max_restart=1)",
        "TypeError: A.options: unknown option *; did you mean 'max_restarts'? *",
    ),
    inside(
        "option_of_a_wrong_type",
        "A.options(num_cpus='two')",
        "TypeError: A.options: option 'num_cpus' must be *, got 'two' (str)*",
    ),
    Mistake(
        "typo_in_a_setting",
        "zc.init(store_capacty=1)",
        "TypeError: zc.init: there is no setting 'store_capacty'; did you mean *",
    ),
    inside(
        "no_such_resource",
        "await A.options(num_gpus=64).spawn()",
        "zcactor.errors.InsufficientResources: 64 GPU were asked for, *",
    ),
    inside(
        "name_taken",
        "for _ in range(2):\n    b = await A.options(name='db').spawn()",
        "zcactor.errors.NameTaken: *'db'*",
    ),
    inside("no_such_name", "await zc.get_actor('dbb')", "zcactor.errors.NoSuchActor: *'dbb'*"),
    Mistake(
        "address_without_a_port",
        "async def main():\n    await zc.init('127.0.0.1')\nzc.run(main())",
        "*Error: *host:port*",
    ),
    # ------------------------------------------------------------ values that travel
    inside("lock_as_argument", "a.same(threading.Lock())", f"TypeError: A.same(): argument x {LOCK}"),
    inside(
        "socket_deep_inside",
        "a.same({'deep': [1, socket.socket()]})",
        'TypeError: A.same(): argument x["deep"][1] cannot be sent: *',
    ),
    inside("file_as_argument", "a.same(open(__file__))", f"TypeError: A.same(): argument x {FILE}"),
    inside("file_by_keyword", "a.same(x={'log': open(__file__)})", f'TypeError: A.same(): argument x["log"] {FILE}'),
    inside(
        "generator_as_argument",
        "a.same(i for i in range(3))",
        "TypeError: A.same(): argument x *; pass a list of its items, *",
    ),
    inside("lock_as_result", "await a.lock()", 'TypeError: the result of A.lock(): value["lock"] cannot be sent: *'),
    inside(
        "write_to_an_argument",
        "await a.inc(np.zeros(100_000))",
        "ValueError: output array is read-only",
        lines=13,
        says="an array that was passed is read-only for all who hold it: write to x.copy(), or pass zc.move(x), *",
    ),
    inside(
        "write_after_passing",
        "x = np.zeros(100_000)\nawait a.same(x)\nx[0] = 1",
        "an array that was passed is read-only for all who hold it: write to x.copy(), or pass zc.move(x), *",
    ),
    inside(
        "larger_than_the_store",
        "await a.same(np.ones(20_000_000))",
        "zcactor.errors.OutOfMemory: *",
        settings="store_capacity=64 << 20",
    ),
    inside(
        "handle_in_a_pickle",
        "import pickle; pickle.dumps(a)",
        "TypeError: handles travel inside calls, puts and results; *",
    ),
    # ------------------------------------------------------------ failures of actors
    inside(
        "breakpoint_in_an_actor",
        "await a.stop_here()",
        "*breakpoint() at breakpoint_in_an_actor.py:* did not stop, as an actor has no terminal: *",
        "*",
        lines=1,
    ),
    inside("method_raises", "await a.boom()", "ValueError: bad thing"),
    inside("generator_raises", "async for x in a.gen():\n    pass", "RuntimeError: camera unplugged"),
    Mistake(
        "constructor_raises",
        "@zc.actor\nclass B:\n    def __init__(self):\n        self.x = open('/nonexistent/model.bin')\n"
        "async def main():\n    async with zc.init():\n        await B.spawn()\nzc.run(main())",
        "FileNotFoundError: [Errno 2] No such file or directory: '/nonexistent/model.bin'",
        lines=13,
    ),
    inside("process_exits", "await a.end()", "zcactor.errors.ActorDied: *exit*3*"),
    inside("process_is_killed", "await a.die()", "zcactor.errors.ActorDied: *SIGKILL*"),
    inside(
        "blocks_its_loop",
        "await a.block()",
        "*A(*) has not come back to its event loop for 1 s: in block, *",
        "*",
        settings="warn_after=1",
    ),
    inside(
        "waits_for_another_call",
        "a.nap()\nawait a.add(1, 2)",
        "*A.add has waited*for A.nap*",
        "*",
        settings="warn_after=1",
    ),
    inside("plain_print", "print(await a.add(1, 2))", "3", "3"),
]
"""The last one is no mistake: a program without one prints its own line alone."""
