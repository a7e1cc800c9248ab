"""A share's order as a model: processes, their threads, streams and deaths, in the order that one seed gives.

The code is the library's: its functions run as generators that stop before each statement, so that another thread, a
stream or a death can come there. What lies below is the model's: words of 64 bits, streams that are queues, locks, the
loop that looks again, and the bytes, which know who may read and write them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Generator
from functools import cache, partial
from itertools import repeat
from random import Random
from types import GeneratorType, SimpleNamespace
from typing import Any

from gpuinterop.errors import GpuInteropError, PeerError, ResourceClosedError, SemaphoreTimeoutError
from gpuinterop.sharing import order, shares

Steps = Generator[None, None, Any]
Mutant = tuple[str, str]
"""What the source says, and what it says instead."""
Kernel = Callable[[], bool]

_SOURCES = (
    *(order.Side, order.Turn, order.Writer, order.Reader, order.FrameWriter, order.FrameReader),
    order.store,
    *(
        shares.ArrayOffer.poll,
        shares.ArrayOffer._drop_readers,
        shares.ArrayOffer._unblock,
        shares.ArrayOffer.take_place,
    ),
)
_BUFFERS = 3
_PAGES = [order.ControlPage(buffers=_BUFFERS) for _ in range(2)]
"""The pages of all worlds' shares: new ones for each would take as long as the rest."""
_MOST = 60_000
"""Turns of the scheduler after which what has not ended hangs."""


class Wrong(AssertionError):
    """The order has failed."""


class _Death(BaseException):
    """Ends a thread of a process that was killed: no statement of it runs any more."""


class _Stops(ast.NodeTransformer):
    """Make generators of functions; what they call by these names, they run in the same way."""

    def __init__(self, tree: ast.AST) -> None:
        self.names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.names = {name for name in self.names if not name.startswith("__")}
        self.names |= {"run", "wait", "host_wait", "under", "newest"}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name == "__init__" else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.YieldFrom(node) if getattr(node.func, "attr", getattr(node.func, "id", "")) in self.names else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for part in () if isinstance(node, ast.Module | ast.ClassDef) else ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, part, None), list):
                setattr(node, part, [one for each in block for one in (ast.Expr(ast.Yield()), each)])
        return node


def _run(call: Callable[..., Any], *arguments: Any) -> Steps:
    found = call(*arguments)
    return (yield from found) if isinstance(found, GeneratorType) else found


@cache
def protocol(mutant: Mutant | None = None) -> dict[str, Any]:
    """The order's code, as generators."""
    body: list[ast.stmt] = []
    found = 0
    for one in _SOURCES:
        lines, first = inspect.getsourcelines(one)
        text = textwrap.dedent("".join(lines))
        if mutant is not None:
            found += text.count(mutant[0])
            text = text.replace(*mutant)
        body += ast.increment_lineno(ast.parse(text), first - 1).body
    assert mutant is None or found == 1, f"the source says {found} times: {mutant[0]}"
    namespace = {**vars(shares), **vars(order)}
    namespace |= {
        "SLOTS": 2,
        "fail_waits": lambda word: word.process.fail_waits(word),
        "awaited": lambda word: any(word is one for stream in word.process.streams for one, _ in stream.waits),
        "server": lambda: Thread.now.process,
        "loop": lambda: Thread.now.process,
        "system": SimpleNamespace(
            under=_under,
            locked=_locked,
            holds=lambda lock: lock.holder is Thread.now,
            fence=lambda: None,
            full_fence=lambda: None,
            SLICE=3,
            seconds_left=_left,
            pauses=lambda: repeat(0.0),
        ),
        "threading": SimpleNamespace(RLock=Lock, get_ident=lambda: Thread.now),
        "value_of": lambda word: order.POISON if word.closed else word.cell[0],
        "time": SimpleNamespace(sleep=lambda _: None),
        "warnings": SimpleNamespace(warn=lambda *_, **__: None),
    }
    module = ast.Module(body, [])
    exec(compile(ast.fix_missing_locations(_Stops(module).visit(module)), order.__file__, "exec"), namespace)
    return namespace


class Lock:
    """One that its holder may take again, and that is free once its holder is dead."""

    holder: Thread | None = None
    times = 0

    def run(self, call: Callable[..., Any], *arguments: Any) -> Steps:
        if self.holder is Thread.now:
            return (yield from _run(call, *arguments))
        yield from self.acquire()
        try:
            return (yield from _run(call, *arguments))
        finally:
            self.holder, self.times = None, 0

    def acquire(self) -> Steps:
        while self.holder not in (None, Thread.now):
            yield
        self.holder, self.times = Thread.now, self.times + 1

    def release(self) -> Steps:
        if self.holder is not Thread.now:
            raise RuntimeError
        self.times -= 1
        self.holder = self.holder if self.times else None
        yield


def _under(lock: Lock, call: Callable[..., Any], *arguments: Any, limit: int = -1) -> Steps:
    if limit == 0 and lock.holder not in (None, Thread.now):
        return (yield from _run(call, *arguments))
    return (yield from lock.run(call, *arguments))


def _locked(method: Callable[..., Any]) -> Callable[..., Steps]:
    def entered(self: Any, *arguments: Any, **named: Any) -> Steps:
        return (yield from self._lock.run(partial(method, **named), self, *arguments))

    return entered


def _left(timeout: float | None) -> Callable[[], int | None]:
    """Each look at the time takes some."""
    left = iter(() if timeout is None else range(int(timeout), 0, -2))
    return lambda: None if timeout is None else next(left, 0)


class Thread:
    """Host code that runs a statement at a time."""

    now: Thread

    def __init__(self, process: Process, name: str, steps: Steps) -> None:
        self.process, self.name, self.steps, self.over = process, f"{process.name}.{name}", steps, False

    def step(self) -> bool:
        Thread.now = self
        try:
            next(self.steps)
        except StopIteration:
            self.over = True
        if self.process.world.traced:
            inner: Any = self.steps
            while (deeper := getattr(inner, "gi_yieldfrom", None)) is not None:
                inner = deeper
            if (frame := inner.gi_frame) is not None and frame.f_code.co_filename == order.__file__:
                self.process.world.tell(f"{self.name} is at {frame.f_code.co_name}, line {frame.f_lineno}")
        return not self.over

    def die(self) -> None:
        while not self.over:
            try:
                self.steps.throw(_Death)
            except (_Death, StopIteration):
                self.over = True


class ControlPage:
    """A process's mapping of a page."""

    def __init__(self, page: order.ControlPage, lock: Lock) -> None:
        self.page, self.lock, self.closed = page, lock, False
        self.words, self.slots = page.words, page.slots
        self.set_turn, self.numbers = page.set_turn, page.numbers

    def newest(self) -> Steps:
        """Tell late, now and then."""
        found = self.page.newest()
        for _ in range(Thread.now.process.world.random.choice((0, 0, 60))):
            yield
        return found

    def close(self) -> None:
        self.closed = True


class Word:
    """A timeline as one process has it; the value is in a cell that all share."""

    unsignalled: Callable[[int, int], GpuInteropError | None] | None = None

    def __init__(self, process: Process, name: str, cell: list[int] | None = None) -> None:
        self.process, self.name, self.label, self.closed, self.lifetime = process, name, name, False, self
        self.naming = "", 0, name
        self.cell = [0] if cell is None else cell
        self.tell = process.world.tell

    @property
    def value(self) -> int:
        self._check()
        return self.cell[0]

    def wait(self, stream: Stream, value: int, *, timeout: float | None = None) -> Steps:
        self._check(stream)
        if stream.host:
            return (yield from self.host_wait(value))
        if timeout is not None:
            raise GpuInteropError("it cannot wait with a timeout")
        entry = (self, value)
        stream.waits.append(entry)
        self.tell(f"{stream.name} is given a wait for {self.name} >= {value}")

        def passes() -> bool:
            if (found := self.cell[0] >= value) and entry in stream.waits:
                stream.waits.remove(entry)
                self.fail(stream, value)
            return found

        stream.give(passes)

    def signal(self, stream: Stream, value: int) -> None:
        self._check(stream)
        if value <= max(self.cell[0], stream.told.get(self, 0)):
            raise GpuInteropError(f"{value} is not greater")
        stream.told[self] = value
        self.tell(f"{stream.name} is given the store of {self.name} = {value}")
        stream.give(partial(self._store, value))

    def host_wait(self, value: int, *, timeout: float = _MOST * 100) -> Steps:
        while self.cell[0] < value:
            self._check()
            if (timeout := timeout - 1) < 0:
                raise SemaphoreTimeoutError("late")
            yield

    def host_signal(self, value: int) -> None:
        self._check()
        if value <= self.cell[0]:
            raise GpuInteropError(f"{value} is not greater")
        self._store(value)

    def close(self) -> None:
        self.closed = True

    def _store(self, value: int) -> bool:
        if value <= self.cell[0] < order.POISON and not self.process.dead:
            raise Wrong(f"{self.name} goes back from {self.cell[0]} to {value}")
        self.tell(f"{self.name} = {value}, by {self.process.name}")
        self.cell[0] = value
        return True

    def fail(self, stream: Stream, value: int) -> None:
        """Fail a stream whose wait for a value passes, or passed, without it."""
        if self.unsignalled is not None and stream.failure is None:
            stream.failure = self.unsignalled(self.cell[0], value)

    def _check(self, stream: Stream | None = None) -> None:
        if self.closed or (stream is not None and stream.closed):
            raise ResourceClosedError("closed")
        if stream is not None and stream.failure is not None:
            raise stream.failure


class Stream:
    """A queue of operations that tell whether they have passed; or the calling thread, which makes each at once."""

    failure: GpuInteropError | None = None
    closed = of_other_thread = False
    """Closed is the wrapper: the queue goes on."""
    device = SimpleNamespace(info=SimpleNamespace(is_cpu=True))

    def __init__(self, process: Process, name: str, *, host: bool = False) -> None:
        self.process, self.name, self.host, self._ptr = process, f"{process.name}.{name}", host, int(not host)
        self.passed = self.given = 0
        self.queue: deque[Callable[[], bool]] = deque()
        self.waits: list[tuple[Word, int]] = []
        self.told: dict[Word, int] = {}

    def _known_as(self) -> Stream:
        return self

    def fence(self) -> Any:
        return SimpleNamespace(is_reached=partial(self._has_passed, self.given))

    def is_capturing(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return not self.queue

    def give(self, operation: Callable[[], bool]) -> None:
        if self.host:
            operation()
        else:
            self.queue.append(operation)
            self.given += 1

    def follow(self, other: Stream) -> None:
        self.give(partial(other._has_passed, other.given))

    def step(self) -> bool:
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        self.passed += 1
        return True

    def _has_passed(self, goal: int) -> bool:
        return self.passed >= goal


class Process:
    """Its turns by share, its streams, its threads, and the loop that serves and looks again."""

    dead = computing = False

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.streams = [Stream(self, f"stream{at}") for at in range(1 + world.random.randrange(3))]
        if world.random.random() < 0.4:
            self.streams.append(Stream(self, "calling", host=True))
        self.turns: dict[Share, Any] = {}
        self.closed: set[Share] = set()
        self.jobs: deque[Callable[[], Any]] = deque()
        self.again: list[Callable[[], Any]] = []
        self.repeat, self.ordered = self.again.append, dict[object, None]()
        self.threads = [Thread(self, "loop", self._loop()), Thread(self, "main", self._main())]

    def fail_waits(self, word: Word) -> None:
        for stream in self.streams:
            for one, value in stream.waits:
                if one is word:
                    word.fail(stream, value)

    @property
    def busy(self) -> bool:
        works = self.jobs or self.again or any(one.queue for one in self.streams)
        return not self.dead and bool(works or not all(one.over for one in self.threads[1:]))

    def _loop(self) -> Steps:
        while True:
            if self.jobs:
                yield from _run(self.jobs.popleft())
            elif self.again:
                one = self.again.pop(0)
                if not (yield from _run(one)):
                    self.again.append(one)
            yield

    def _main(self) -> Steps:
        random = self.world.random
        for share in self.world.shares:
            if share.home is not self and not (yield from share.enrol(self)):
                return
        if random.random() < 0.15:  # another thread closes at some time
            self.threads.append(Thread(self, "other", self._end(random.randrange(60))))
            self.world.actors.append(self.threads[-1])
        for _ in range(1 + random.randrange(self.world.most_rounds)):
            if not (yield from self._round(random)):
                break
        yield from self._end(0)

    def _round(self, random: Random) -> Steps:
        streams = [one for one in self.streams if not one.closed and one.failure is None]
        if not streams:
            return False
        share = random.choice(list(self.turns))
        stream = random.choice(streams)
        stream.closed = random.random() < 0.03
        timeout = random.randrange(1, 200) if random.random() < (0.5 if stream.host else 0.03) else None
        noticed, floor = self in share.noticed, share.released
        try:
            if isinstance(share, Frames):
                yield from share.round(self, stream, timeout)
                return True
            try:
                yield from self.turns[share].acquire(stream, self.world.code["time_left"](timeout))
            except GpuInteropError:
                if self.turns[share].inside:
                    raise Wrong(f"{self.name} was refused, and is in") from None
                raise
            self.world.tell(f"{self.name} has come in on {stream.name}")
            if noticed or (share.version < floor and stream.host):
                raise Wrong(f"{self.name} came in, and knows that the writer is dead")
            self.computing = stream.host
            if not self.turns[share].failure:
                begin, end = share.kernel(self, stream, floor)
                stream.give(begin)
                if stream.host:
                    yield
                stream.give(end)
            self.computing = False
            yield
            behind = random.choice(streams)
            if behind.host or stream.host or behind.closed or random.random() < 0.7:
                behind = stream
            else:
                behind.follow(stream)
            behind.closed = behind.closed or (random.random() < 0.05 and not behind.host)
            yield from self.turns[share].release(behind)
            self.world.tell(f"{self.name} has gone out of share {share.number}")
            share.has_released(self)
        except GpuInteropError as error:
            self.world.tell(f"{self.name} is refused: {error!r}")
            ended = any(turns.failure for turns in self.turns.values())
            if not (ended or timeout or any(one.closed or one.failure for one in streams)):
                raise Wrong(f"{self.name} is refused for no reason: {error!r}") from None
            return not any(turns.failure or turns.inside for turns in self.turns.values())
        return True

    def _end(self, patience: int) -> Steps:
        while self.computing or patience > 0:
            patience -= 1
            yield
        for share, turns in self.turns.items():
            if share in self.closed:
                continue
            self.closed.add(share)
            yield from turns.end(ResourceClosedError("closed"))
            if share.home is not self and self not in share.left:
                share.left.add(self)
                self.repeat(partial(self._is_released, share, turns))

    def _is_released(self, share: Share, turns: Any) -> Steps:
        if not (yield from turns.close_if_released()):
            return False
        share.watchers.discard(self)
        share.ends(self)
        return True


class _Namespace(SimpleNamespace):
    """What `arrays.acquire` is given, or an offer."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class Share:
    """One share: its bytes, and what may be seen of them when."""

    prefix, more = "", tuple[int, ...]()

    def __init__(self, world: World, number: int, home: Process) -> None:
        self.world, self.number, self.home = world, number, home
        self.version, self.written, self.released, self.writing = -1, 0, 0, False
        self.reading: dict[int, Process] = {}
        self.misled: list[tuple[Process, Stream]] = []
        self.noticed, self.watchers, self.left, self.ended = (set[Process]() for _ in range(4))
        page, self.lock = _PAGES[number], Lock()
        page.words[2] = 0
        page.slots[: 2 * _BUFFERS] = [0] * 2 * _BUFFERS
        self.writer = self._made("Writer", ControlPage(page, self.lock), Word(home, f"writer{number}"), "", *self.more)
        home.turns[self] = self.writer
        (first := world.random.choice(home.streams)).give(partial(self._write, 0))
        deque(self.writer.publish_first(first), 0)
        device = SimpleNamespace(
            create_semaphore=lambda kind, label: Word(home, f"reader{number}.{len(self.watchers)}")
        )
        self.offer = _Namespace(
            writer=lambda: self.writer,
            _writer=self.writer,
            label="",
            device=device,
            _places={},
            _leaving=set(),
            _lock=Lock(),
            is_over=False,
            slot=0,
            buffers=_BUFFERS,
        )
        for name in ("_drop_readers", "_unblock"):
            setattr(self.offer, name, partial(world.code[name], self.offer))
        self.guests = {
            process: SimpleNamespace(ended=False, pid=0, counts=SimpleNamespace(holds=lambda slot: True))
            for process in world.processes
        }

    def _made(self, kind: str, *arguments: Any) -> Any:
        return self.world.code[self.prefix + kind](*arguments)

    def enrol(self, process: Process) -> Steps:
        """A reader takes its place, in the writer's loop."""
        answer: list[Any] = []

        def serve() -> Steps:
            try:
                if process not in self.ended:
                    answer.append(
                        (yield from self.world.code["take_place"](self.offer, self.guests[process], process.name))
                    )
            except PeerError:
                answer.append(None)

        self.home.jobs.append(serve)
        while not answer and not self.home.dead:
            yield
        if not answer or answer[0] is None:
            return False
        self.watchers.add(process)
        place, writer = answer[0], self.writer
        words = (Word(process, word.name, word.cell) for word in (writer.own, writer.reader_timelines[place]))
        page = ControlPage(writer.page.page, self.lock)
        process.turns[self] = self._made("Reader", page, *words, place, process.name)
        if self.home.dead:
            process.jobs.append(partial(self.notices, process))
        return True

    def forget(self, process: Process) -> None:
        """A process dies."""
        self.reading = {one: reader for one, reader in self.reading.items() if reader is not process}

    def ends(self, process: Process) -> None:
        """The writer's loop learns of the end of a lease."""
        if process not in self.ended:
            self.ended.add(process)
            self.guests[process].ended = process.dead
            self.home.jobs.append(lambda: self.world.code["poll"](self.offer))

    def notices(self, process: Process) -> Steps:
        """A reader's loop learns of the writer's death."""
        if process in self.watchers:
            yield from process.turns[self].poison()
            self.noticed.add(process)

    def has_released(self, process: Process) -> None:
        if process is self.home:
            self.released = self.written

    def kernel(self, process: Process, stream: Stream, floor: int) -> tuple[Kernel, Kernel]:
        """The two ends of a kernel that writes or reads the bytes."""
        if process is self.home:
            self.written += 1
            return partial(self._begin, stream), partial(self._write, self.written)
        look = partial(self._poll, process, stream, floor, list[int]())
        return look, look

    def _begin(self, stream: Stream) -> bool:
        self.world.tell(f"{stream.name} writes share {self.number}")
        if not self.home.dead:
            if self.reading or self.writing:
                raise Wrong(f"{stream.name} writes while others read or write")
            self.writing = True
        return True

    def _write(self, version: int) -> bool:
        self.world.tell(f"share {self.number} is at version {version}")
        self.writing, self.version = False, version
        return True

    def _poll(self, process: Process, stream: Stream, floor: int, seen: list[int]) -> bool:
        self.world.tell(f"{stream.name} sees version {self.version} of share {self.number}, due is {floor} or later")
        if process.dead:
            return True
        if self.writing or self.version < floor or seen not in ([], [self.version]):
            if not self.home.dead:
                raise Wrong(f"{stream.name} sees version {self.version} after {seen}, due is {floor} or later")
            self.misled.append((process, stream))
        if seen:
            del self.reading[id(seen)]
        else:
            self.reading[id(seen)] = process
        seen.append(self.version)
        return True


class Frames(Share):
    """One name's frames: what each buffer has, and who uses it."""

    prefix, more = "Frame", (_BUFFERS,)

    def __init__(self, world: World, number: int, home: Process) -> None:
        super().__init__(world, number, home)
        self.content, self.used = [0] * _BUFFERS, [list[Stream]() for _ in range(_BUFFERS)]
        self.seen: dict[Process, int] = {}
        self.dropped = set[int]()

    def forget(self, process: Process) -> None:
        self.used = [[stream for stream in users if stream.process is not process] for users in self.used]

    def round(self, process: Process, stream: Stream, timeout: float | None) -> Steps:
        """Write a frame, or read one."""
        turns, random = process.turns[self], self.world.random
        writes = process is self.home
        if not writes:
            if (found := (yield from turns.claim(self.seen.get(process, 0)))) is None:
                yield
                return
            self.seen[process] = found
            for _ in range(random.choice((0, 0, 100))):
                yield
            if random.random() < 0.2:
                return  # it takes the next one
        try:
            yield from turns.acquire(stream, self.world.code["time_left"](timeout))
        except PeerError:
            if (yield from turns.is_whole()) and self.content[turns.buffer] != found:
                raise Wrong(f"{process.name} takes frame {found} for whole") from None
            raise
        number, buffer = turns._turn - 1 if writes else found, turns.buffer
        process.computing = stream.host
        stream.give(partial(self._begins, stream, buffer, number))
        yield
        stream.give(partial(self._ends, stream, buffer, number))
        process.computing, whole = False, True
        if writes:
            whole = random.random() < 0.8
            if not whole:
                self.dropped.add(number)
        others = [one for one in process.streams if not (one.closed or one.host or stream.host)]
        behind = random.choice([stream, *others])
        if behind is not stream:
            behind.follow(stream)
        yield from turns.release(behind, whole=whole)

    def _begins(self, stream: Stream, buffer: int, number: int) -> bool:
        users, content, writes = self.used[buffer], self.content[buffer], stream.process is self.home
        self.world.tell(f"{stream.name} begins with buffer {buffer}, which has {content}, for {number}")
        if not (self.home.dead or stream.process.dead):
            if not writes and (content != number or number in self.dropped):
                raise Wrong(f"{stream.name} reads {number}, and finds {content}")
            if users and (writes or any(one.process is self.home for one in users)):
                raise Wrong(f"{stream.name} comes to buffer {buffer}, which {[one.name for one in users]} use")
        if not stream.process.dead:
            users.append(stream)
        return True

    def _ends(self, stream: Stream, buffer: int, number: int) -> bool:
        if stream in self.used[buffer]:
            self.used[buffer].remove(stream)
        if stream.process is self.home:
            self.content[buffer] = number
        return True


class World:
    """All of it, made of one seed."""

    kind: type[Share] = Share
    most_rounds = 4

    def __init__(self, seed: int, *, mutant: Mutant | None = None, traced: bool = False) -> None:
        self.code, self.traced, self.events = protocol(mutant), traced, list[str]()
        self.random = random = Random(seed)
        self.processes = [Process(self, f"process{at}") for at in range(2 + random.randrange(3))]
        homes = [self.processes[0], self.processes[random.randrange(2)]]
        self.shares = [self.kind(self, at, homes[at]) for at in range(1 + (random.random() < 0.6))]
        self.actors: list[Thread | Stream] = []
        for process in self.processes:
            self.actors += [*process.threads, *process.streams]
        self.due: list[tuple[int, Callable[[], object]]] = [
            (at := random.randrange(300), partial(self._kill, process, at))
            for process in self.processes
            if random.random() < (0.2 if process in homes else 0.4)
        ]
        rate = random.choice((0.05, 0.2, 0.4))
        self.rests = {one: random.randrange(400) for one in self.actors if random.random() < rate}

    def tell(self, event: str) -> None:
        if self.traced:
            self.events.append(event)

    def _kill(self, process: Process, at: int) -> None:
        """Stop its threads. What its GPU had begun may come late, or never."""
        random = self.random
        self.tell(f"{process.name} dies")
        process.dead = True
        for thread in process.threads:
            thread.die()
        self.actors = [one for one in self.actors if one not in process.threads]
        for stream in process.streams:
            while stream.queue and random.random() < 0.3:
                stream.queue.pop()
        if random.random() < 0.5:
            self.rests.update((one, at + 150) for one in self.actors if isinstance(one, Stream))
        self.rests.update((one, at + random.randrange(150)) for one in process.streams)
        for share in self.shares:
            share.forget(process)
            if process is not share.home:
                self.due.append((at + random.randrange(100), partial(share.ends, process)))
                continue
            share.writing = False
            for other in self.processes:
                learns = partial(other.jobs.append, partial(share.notices, other))
                self.due.append((at + random.randrange(random.choice((30, 600))), learns))

    def run(self) -> None:
        """Go on until all that lives has ended."""
        try:
            self._go_on()
        finally:
            for thread in (one for process in self.processes for one in process.threads):
                thread.die()
        for share in self.shares:
            for process, stream in share.misled:
                if not (process.dead or stream.failure or process in share.left):
                    raise Wrong(f"{process.name} has read what the dead writer left, and was not told")

    def _go_on(self) -> None:
        chance, rests = self.random.random, self.rests
        burst = self.random.choice((1, 3, 8, 20))
        for at in range(_MOST):
            for event in [one for one in self.due if one[0] <= at] if self.due else ():
                self.due.remove(event)
                event[1]()
            actor = self.actors[int(chance() * len(self.actors))]
            if rests.get(actor, 0) > at:
                continue
            for _ in range(1 + int(chance() * burst)):
                if not actor.step():
                    if isinstance(actor, Thread):
                        self.actors.remove(actor)
                    break
            if not at % 32 and not self.due and not any(one.busy for one in self.processes):
                return
        raise Wrong(f"these hang: {', '.join(one.name for one in self.processes if one.busy)}")


class FrameWorld(World):
    """The same with frames."""

    kind, most_rounds = Frames, 16


def problem(seed: int, mutant: Mutant | None = None, world: type[World] = World) -> str | None:
    """What goes wrong, and how; None if nothing does. What a seed gives, it gives again: that is how it is told."""
    told: list[str] = []
    for traced in (False, True):
        made = world(seed, mutant=mutant, traced=traced)
        try:
            made.run()
        except Wrong as error:
            told = [f"seed {seed}: {error}", *(f"  {event}" for event in made.events)]
        else:
            assert not told, f"seed {seed} fails, and does not when it is run again"
            return None
    return "\n".join(told)
