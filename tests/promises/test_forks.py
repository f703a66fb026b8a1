"""Arrays after a fork: parent and child see the bytes of that moment, and write to copies of their own."""

from __future__ import annotations

import pytest

from tests.driver.programs import Program

PRELUDE = """
import concurrent.futures.thread  # it holds a lock over each fork, so its hooks come before the one below
import multiprocessing as mp

N = 1 << 17

class Peer:
    def made(self, value): return np.full(N, value)
    def moved(self, value): return zc.move(np.full(N, value))
    def fill(self, value): self.others = [np.full(N, value) for _ in range(6)]
    def ends(self, x): return float(x.min()), float(x.max())
    def keep(self, x): self.x = x
    def kept(self): return float(self.x.min()), float(self.x.max())

def ends(x): return [float(x.min()), float(x.max())]

class Child:
    # A forked child, which does what `work` does once it is told to.
    def __init__(self, work):
        self.go, answer = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.go[1])
                os.read(self.go[0], 1)
                os.write(answer[1], json.dumps(work()).encode())
            finally: os._exit(0)
        os.close(answer[1])
        os.close(self.go[0])
        self.answer = answer[0]
    def result(self):
        os.write(self.go[1], b"x")  # a later child has this end, too, so closing it tells nothing
        os.close(self.go[1])
        with open(self.answer) as file: text = file.read()
        os.waitpid(self.pid, 0)
        return json.loads(text)

def later(*values): return [np.full(N, value) for value in values]

HOOK = None  # runs in the parent after a fork, before zcactor's hooks
os.register_at_fork(after_in_parent=lambda: HOOK and HOOK())
"""
CASES = {
    "a process's arguments": """
        queue = mp.get_context("fork").SimpleQueue()
        for _ in range(5):
            gate = mp.get_context("fork").Event()
            def work(x, queue): gate.wait(); queue.put(ends(x))
            process = mp.get_context("fork").Process(target=work, args=(np.full(N, 1.0), queue))
            process.start()
            others = later(7.0, 8.0)
            gate.set()
            assert queue.get() == [1.0, 1.0]
            process.join()
    """,
    "writes of the parent and of the child": """
        x, y = np.full(N, 1.0), zc.full(N, 1.0)
        def work(): first = ends(x) + ends(y); x[:] = y[:] = 5.0; return first + ends(x) + ends(y)
        child = Child(work)
        x[:] = y[:] = 7.0
        assert child.result() == [1.0] * 4 + [5.0] * 4
        assert ends(x) == ends(y) == [7.0, 7.0]
    """,
    "memory that is used again": """
        x, y = np.full(N, 1.0), zc.full(N, 1.0)
        held = [x, y]
        child = Child(lambda: ends(held[0]) + ends(held[1]))
        del x, y
        kept, held = held, None
        kept.clear()
        del kept
        others = later(7.0, 8.0, 9.0) + [zc.full(N, 7.0) for _ in range(3)]
        zc.stats()
        assert child.result() == [1.0] * 4
    """,
    "received arrays": """
        x = await peer.made(3.0)
        child = Child(lambda: ends(x))
        x = None
        await peer.fill(9.0)
        await peer.fill(8.0)
        assert child.result() == [3.0, 3.0]
    """,
    "moved arrays": """
        x = await peer.moved(3.0)
        def work(): first = ends(x); x[:] = 5.0; return first + ends(x)
        child = Child(work)
        x[:] = 4.0
        assert child.result() == [3.0, 3.0, 5.0, 5.0]
        assert ends(x) == [4.0, 4.0]
        assert await peer.ends(x) == (4.0, 4.0)
        y = await peer.moved(6.0)
        y += 1
        assert await peer.ends(zc.move(y)) == (7.0, 7.0)
    """,
    "a moved array is moved on": """
        x = await peer.moved(3.0)
        child = Child(lambda: ends(x))
        x[:] = 4.0
        await peer.keep(zc.move(x))
        assert await peer.kept() == (4.0, 4.0)
        assert child.result() == [3.0, 3.0]
    """,
    "an array that comes home": """
        x = zc.full(N, 1.0)
        mine = await scaler.scale(zc.move(x), 3.0)
        child = Child(lambda: ends(mine))
        mine[:] = 5.0
        mine = await scaler.scale(zc.move(mine), 3.0)
        assert ends(mine) == [15.0, 15.0]
        assert child.result() == [3.0, 3.0]
    """,
    "passing after a write": """
        x, y, frozen = np.full(N, 1.0), zc.full(N, 1.0), np.full(N, 2.0)
        await peer.keep(frozen)
        child = Child(lambda: ends(x) + ends(y) + ends(frozen))
        x += 1
        y += 2
        before = zc.stats().copies.get("argument outside the store")
        assert await peer.ends(x) == (2.0, 2.0) and await peer.ends(y) == (3.0, 3.0)
        after = zc.stats().copies["argument outside the store"]
        assert after.count - (before.count if before else 0) == 2
        assert await peer.ends(frozen) == (2.0, 2.0) == await peer.kept()
        assert zc.stats().copies["argument outside the store"] == after
        for array in (x, y):
            try: array[0] = 1.0
            except ValueError: pass
            else: raise AssertionError("open")
        assert child.result() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    """,
    "twice, and a grandchild": """
        x = np.full(N, 1.0)
        def work():
            grandchild = Child(lambda: ends(x))
            x[:] = 5.0
            return grandchild.result() + ends(x)
        first = Child(work)
        x[:] = 2.0
        second = Child(lambda: ends(x))
        x[:] = 3.0
        assert first.result() == [1.0, 1.0, 5.0, 5.0]
        x[:] = 4.0
        assert second.result() == [2.0, 2.0]
        assert ends(x) == [4.0, 4.0]
    """,
    "in a thread of the user's": """
        x, found = np.full(N, 1.0), []
        def fork():
            child = Child(lambda: ends(x))
            x[:] = 7.0
            found.append(child.result())
        thread = threading.Thread(target=fork)
        thread.start()
        while not found: await peer.made(1.0)
        thread.join()
        assert found == [[1.0, 1.0]]
    """,
    "two at once": """
        global HOOK
        x = await peer.made(3.0)
        go, done = threading.Event(), threading.Event()
        def fork(): go.wait(); Child(lambda: 1).result(); done.set()
        def hook():  # the other thread's child comes and goes before this thread notes what its own child reads
            global HOOK
            HOOK = None
            go.set()
            done.wait()
        thread = threading.Thread(target=fork)
        thread.start()
        HOOK = hook
        child = Child(lambda: ends(x))
        thread.join()
        x = None
        await peer.fill(9.0)
        await peer.fill(8.0)
        assert child.result() == [3.0, 3.0]
    """,
    "a pool": """
        global DATA
        DATA = np.full(N, 1.0)
        with mp.get_context("fork").Pool(2) as pool:
            wanted = pool.map_async(of_data, range(8))
            DATA = np.full(N, 7.0)
            more = later(9.0, 10.0)
            assert wanted.get(20) == [[1.0, 1.0]] * 8
    """,
    "memory comes back": """
        for _ in range(40):
            held = [np.full(1 << 20, 1.0)]
            child = Child(lambda: ends(held[0]))
            held.clear()
            assert child.result() == [1.0, 1.0]
        x = np.full(1 << 20, 2.0)
        assert zc.in_store(x)
    """,
    "children that run other programs": """
        x = zc.full(N, 1.0)
        assert subprocess.run([sys.executable, "-c", "pass"]).returncode == 0
        assert zc.in_store(x)
        x += 1
        copies = zc.stats().copies
        assert await peer.ends(x) == (2.0, 2.0)
        assert zc.stats().copies == copies
    """,
    "in a method": """
        forks = await zc.spawn(Forks)
        assert await forks.plain() == await forks.on_the_loop() == [[1.0, 1.0], [7.0, 7.0]]
    """,
    "during calls that bring arrays": """
        refs = [peer.made(float(k)) for k in range(50)]
        children, x = [], np.full(N, 1.0)
        while not all([ref.done() for ref in refs]) or len(children) < 3:
            if len(children) < 3: children.append(Child(lambda: ends(x)))
            await asyncio.sleep(0)
        arrays = await zc.get(refs)
        assert [ends(array) for array in arrays] == [[float(k)] * 2 for k in range(50)]
        for array in arrays[::10]: assert await peer.ends(array) == (array[0], array[0])
        assert [child.result() for child in children] == [[1.0, 1.0]] * 3
    """,
    "during a sum of a group": """
        members = [await zc.actor(Member).options(num_cpus=0).spawn() for _ in range(2)]
        group = await zc.group(members)
        for count in (100, 1 << 16, 1 << 20):
            for own in (False, True):
                calls = [each.forks_in(group, count, own, rank + 1.0) for rank, each in enumerate(members)]
                found = await zc.get(calls)
                assert found == [[[3.0, 3.0], [rank + 1.0] * 2, [9.0, 9.0]] for rank in range(2)], (count, own, found)
    """,
    "during a sum of small arrays": """
        members = [await zc.actor(Member).options(num_cpus=0).spawn() for _ in range(3)]
        group = await zc.group(members)
        for turn in range(3):
            found = await zc.get([each.forks_in(group, 1500, False, rank + 1.0) for rank, each in enumerate(members)])
            assert found == [[[6.0, 6.0], [rank + 1.0] * 2, [9.0, 9.0]] for rank in range(3)], found
    """,
    "writes to arrays that were closed before": """
        x, y = np.full(N, 1.0), np.full(N, 1.0)
        view = y[:]
        await peer.keep(x)
        await peer.keep(y)
        child = Child(lambda: ends(x) + ends(y))
        try: x.flags.writeable = True
        except ValueError: pass  # nobody can open an array of which a peer has a copy
        else:
            x[:] = 2.0
            x.flags.writeable = False
        view[:] = 3.0
        for _ in range(2):
            assert [*await peer.ends(x)] == ends(x) and await peer.ends(y) == await peer.ends(y[5:]) == (3.0, 3.0)
        assert child.result() == [1.0] * 4
    """,
    "while moved arrays are copied": """
        done = []
        def fork():
            while not done: Child(lambda: 1).result()
        thread = threading.Thread(target=fork)
        thread.start()
        for value in range(1, 31):
            x = np.full(2 * N, float(value))
            look = x[:10]  # the array is copied, as somebody else holds its memory
            await peer.keep(zc.move(x))
            assert await peer.kept() == (value, value)
        done.append(1)
        thread.join()
    """,
    "sums after a fork and a write": """
        members = [await zc.actor(Member).options(num_cpus=0).spawn() for _ in range(2)]
        group = await zc.group(members)
        for count in (100, 2048, 1 << 13, 1 << 16, 1 << 18):
            for name in ("np.full", "zc.full", "halves", "pieces"):
                for turn in range(2):  # of two ranks, one reads the other's array, by turns
                    calls = [each.writes(group, count, name, rank + 1.0) for rank, each in enumerate(members)]
                    found = await zc.get(calls)
                    assert found == [[30.0, 30.0, 30.0, 30.0, 10.0, 20.0]] * 2, (count, name, found)
    """,
}
CLASSES = """
class Scaler:
    @zc.method
    def scale(self, x: np.ndarray, factor: float) -> np.ndarray:
        x *= factor
        return zc.move(x)
class Forks:
    def plain(self):
        x = np.full(N, 1.0)
        child = Child(lambda: ends(x))
        x[:] = 7.0
        return [child.result(), ends(x)]
    async def on_the_loop(self): return self.plain()
class Member:
    # Forks while its input is lent to the other ranks, and while it reads theirs; `own` gives the place of the result.
    async def forks_in(self, group, count, own, value):
        x, out = np.full(count, value), np.empty(count) if own else None
        work = group.allreduce(x, out=out)
        children = [Child(lambda: ends(x))]
        while not work.done():
            if len(children) < 3: children.append(Child(lambda: ends(x)))
            await asyncio.sleep(0)
        total = await work
        x[:] = 9.0
        told = [child.result() for child in children]
        assert all(each == told[0] for each in told), told
        return [ends(total), told[0], ends(x)]
    async def writes(self, group, count, name, value):
        made = zc.full(count, value) if name == "zc.full" else np.full(count if name == "np.full" else 2 * count, value)
        x = {"halves": made[:count], "pieces": made[::2]}.get(name, made)
        if name == "halves": del made
        child = Child(lambda: ends(x))
        x[:] = 10 * value
        total, all_of_them = await group.allreduce(x), await group.allgather(x)
        async with group.reducer(op="sum") as reducer: reducer.add("x", x)
        assert child.result() == [value] * 2
        return ends(total) + ends(reducer.result()["x"]) + ends(all_of_them)
def of_data(_): return ends(DATA)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "loop"), [("local", "uvloop"), ("tcp", "asyncio")])
@pytest.mark.parametrize("case", CASES)
def test_arrays_after_a_fork(case: str, transport: str, loop: str) -> None:
    body, eager = CASES[case], 4096 if "small" in case else 16384
    source = f"""{PRELUDE}{CLASSES}
async def main():
    async with zc.init(transports=["{transport}"], store_capacity=64 << 20, eager_limit={eager}):
        peer, scaler = await zc.spawn(Peer), await zc.spawn(Scaler)
{body}
    tell(end=1)
zc.run(main())
"""
    with Program(source, env={"ZCACTOR_LOOP": loop}) as program:
        assert program.told("end") == 1, program.stderr()
        assert program.status() == 0
        program.assert_clean()
