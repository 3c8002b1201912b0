"""What a step does, call by call: torch operations, kernel launches, host reads, and who asked.

`watching` sees every torch operation through a dispatch mode and every Triton launch where Triton
makes it, each with the line of Python that caused it. A graph keeps exactly this sequence, with
the addresses and host values of one run; so what differs between two runs is what a graph gets
wrong. `capture` reads from it what must stay alive, `record` plays it back, `audit` compares runs.

On a CPU the step is judged as if its tensors lived on a GPU: reading one counts as a host sync.

Not seen: kernels launched past torch and Triton (an extension called with raw pointers), and what
happens inside torch.compile's code, which runs eagerly under a dispatch mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcp_lab.kernels import INTERPRETED
from dcp_lab.kernels.launch import BoundCalls

# Operations that bring a value, or a shape that depends on values, to the host.
_SYNCING_OPS = {
    "aten._local_scalar_dense",
    "aten._unique2",
    "aten.bincount",
    "aten.equal",
    "aten.masked_select",
    "aten.nonzero",
    "aten.unique_consecutive",
    "aten.unique_dim",
}
# Methods that copy a tensor to the host; on a CPU they are no operation that torch dispatches.
_HOST_READS = {"tolist", "cpu", "numpy", "__array__"}
_TORCH_SYNC_WARNING = "called a synchronizing CUDA operation"
# Process groups that run on the host: nothing of them can be in a graph.
_HOST_BACKENDS = {"gloo", "mpi"}
_TRAIL = 6


class Site(NamedTuple):
    """A line of Python."""

    path: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The line's text, empty where there is no source."""
        return linecache.getline(self.path, self.line).strip()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


Trail = tuple[Site, ...]


def _folder(module_file: str | None) -> str:
    return os.path.dirname(module_file or "") + os.sep


_TRITON = importlib.util.find_spec("triton")
_HERE = _folder(__file__)
_LIBRARIES = (
    _HERE,
    _folder(torch.__file__),
    contextlib.__file__,
    warnings.__file__,
    *([_folder(_TRITON.origin)] if _TRITON else []),
)


def trail() -> Trail:
    """Return the lines of the step that led here, the innermost first, torch's left out."""
    frame, frames = sys._getframe(1), []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _sites(frames)


def trail_of(error: BaseException) -> Trail:
    """Return the lines of the step that led to an exception, as trail does."""
    traceback, frames = error.__traceback__, []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _sites(reversed(frames))


def _sites(frames: Iterable[tuple[CodeType, int]]) -> Trail:
    sites: list[Site] = []
    for code, line in frames:
        if not code.co_filename.startswith(_LIBRARIES):
            sites.append(Site(code.co_filename, line, code.co_name))
        elif sites and code.co_filename.startswith(_HERE):
            # Whoever called the step from this folder is not part of it.
            break
    return tuple(sites[:_TRAIL])


class Operand(NamedTuple):
    """A tensor as one call got it.

    Attributes:
        storage: Identity of its memory; unique while the trace lives.
        address, nbytes: Of the memory, not of the view.
        dtype: Of the tensor.
        view: (shape, strides, offset).
    """

    storage: int
    address: int
    nbytes: int
    dtype: torch.dtype
    view: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation or launch.

    Attributes:
        name: 'aten.add.Tensor', or the kernel's name.
        where: The lines that led to it.
        host_values: Everything passed by value: numbers, shapes, strides, the grid.
        operands: The tensors it got and gave.
        again: Does the same once more on the same tensors; None unless the trace keeps them.
    """

    name: str
    where: Trail
    host_values: tuple[object, ...]
    operands: tuple[Operand, ...]
    again: Callable[[], None] | None = dataclasses.field(default=None, repr=False)


class Made(NamedTuple):
    """Memory that the step allocated.

    Attributes:
        order: Its place among all that the step allocated.
        where: The lines that led to it.
        address, nbytes, device_type: Of the memory.
        from_host: Whether it was filled with host data, as by torch.tensor.
        alive: Expires when nobody holds the memory.
    """

    order: int
    where: Trail
    address: int
    nbytes: int
    device_type: str
    from_host: bool
    alive: StorageWeakRef


class Event(NamedTuple):
    """Something that a graph cannot hold."""

    where: Trail
    what: str


@dataclasses.dataclass
class Trace:
    """What `watching` saw.

    Attributes:
        device_type: "cuda" or "cpu": where the step's work is.
        calls: In order.
        made: Memory that the step allocated, by storage.
        external: Memory that was there before, by storage, kept alive by this trace.
        syncs, collectives, constants: Host syncs; collectives that no graph can hold; tensors made
            from host data.
    """

    device_type: str
    keep: bool = False
    calls: list[Call] = dataclasses.field(default_factory=list)
    made: dict[int, Made] = dataclasses.field(default_factory=dict)
    external: dict[int, torch.UntypedStorage] = dataclasses.field(default_factory=dict)
    syncs: list[Event] = dataclasses.field(default_factory=list)
    collectives: list[Event] = dataclasses.field(default_factory=list)
    constants: list[Event] = dataclasses.field(default_factory=list)
    paused: bool = False

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the step allocated this tensor's memory."""
        return tensor.untyped_storage()._cdata in self.made

    def writer_of(self, result: object) -> Trail:
        """Return the lines of the last call that had the result's memory."""
        returned = {t.untyped_storage()._cdata for t in tensors_in(result)}
        for call in reversed(self.calls):
            if any(operand.storage in returned for operand in call.operands):
                return call.where
        return ()

    def _allocate(self, tensor: torch.Tensor, *, from_host: bool = False) -> None:
        storage = tensor.untyped_storage()
        self.made[storage._cdata] = Made(
            order=len(self.made),
            where=trail(),
            address=storage.data_ptr(),
            nbytes=storage.nbytes(),
            device_type=tensor.device.type,
            from_host=from_host,
            alive=StorageWeakRef(storage),
        )

    def _operand(self, tensor: torch.Tensor) -> Operand:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.made:
            self.external[storage._cdata] = storage
        view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        address = storage.data_ptr()
        return Operand(storage._cdata, address, storage.nbytes(), tensor.dtype, view)

    def _add(
        self,
        name: str,
        values: Iterable[object],
        tensors: list[torch.Tensor],
        again: Callable[[], None],
    ) -> None:
        numbers = [tensor for tensor in tensors if self._is_number(tensor)]
        operands = [self._operand(t) for t in tensors if not self._is_number(t)]
        self.paused = True
        host_values = (
            *map(_as_value, values),
            *(repr(number.tolist()) for number in numbers),
            *(operand.view for operand in operands),
        )
        self.paused = False
        again = again if self.keep else None
        self.calls.append(Call(name, trail(), host_values, tuple(operands), again))

    def _is_number(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is passed by value: a host number that torch wrapped."""
        if tensor.device.type != "cpu":
            return False
        made = self.made.get(tensor.untyped_storage()._cdata)
        wrapped = made is not None and made.from_host
        return wrapped or (tensor.dim() == 0 and self.device_type != "cpu")


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the strided tensors in a nest of tuples, lists and dicts."""
    leaves = tree_leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.layout == torch.strided]


@contextlib.contextmanager
def watching(device_type: str, *, keep: bool = False) -> Iterator[Trace]:
    """Watch what this thread does inside the block.

    Args:
        device_type: "cuda" or "cpu": the operations of this device are the step's work; those of
            the other are the host's own affair.
        keep: Keep every tensor, so that the calls can be made again.
    """
    trace = Trace(device_type, keep)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_launches_into(trace))
        if device_type == "cuda":
            stack.enter_context(_cuda_syncs_into(trace))
        stack.enter_context(_HostReads(trace))
        stack.enter_context(_Operations(trace))
        yield trace


class _Operations(TorchDispatchMode):
    """Writes every torch operation into a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.trace.paused:
            self._see(func, args, kwargs, result)
        return result

    def _see(self, func: Any, args: tuple, kwargs: dict, result: object) -> None:
        trace, name = self.trace, str(func.overloadpacket)
        given, got = tensors_in((args, kwargs)), tensors_in(result)
        if func.namespace == "c10d":
            trace.collectives.extend(_impossible_collective(name, args, kwargs))
        if name == "aten.lift_fresh":
            # torch.tensor and its kin. A single number is an immediate of the call that uses it.
            for tensor in got:
                trace._allocate(tensor, from_host=True)
                if tensor.dim() and tensor.device.type == trace.device_type:
                    trace.constants.append(Event(trail(), "a tensor is made from host data"))
            return
        if not any(t.device.type == trace.device_type for t in given + got):
            return
        if _syncs(name, args, kwargs) and any(t.device.type == trace.device_type for t in given):
            trace.syncs.append(Event(trail(), f"{name} waits for a value from the device"))
        known = {t.untyped_storage()._cdata for t in given}
        for tensor in got:
            if tensor.untyped_storage()._cdata not in known and not trace.owns(tensor):
                trace._allocate(tensor)
        # Neither an allocation nor a view launches anything.
        if not name.startswith(("aten.empty", "aten.new_empty")) and not func.is_view:
            values = [v for v in tree_leaves((args, kwargs)) if not isinstance(v, torch.Tensor)]
            again = _again(func, args, kwargs, result, known)
            trace._add(str(func), values, given + got, again)


class _HostReads(TorchFunctionMode):
    """Writes reads of whole tensors into a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and not self.trace.paused:
            tensor = args[0] if args else None
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.trace.device_type:
                self.trace.syncs.append(Event(trail(), f"{name}() copies a tensor to the host"))
        return func(*args, **(kwargs or {}))


def _again(
    func: Any, args: tuple, kwargs: dict, result: object, known: set[int]
) -> Callable[[], None]:
    """Return what runs an operation again and leaves the result in the tensors of the first time.

    Args:
        func, args, kwargs, result: The call and what it returned.
        known: Storages of its arguments; a result among them was written in place.
    """

    def again() -> None:
        with torch.no_grad():
            new_result = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(new_result), strict=True):
                if isinstance(old, torch.Tensor):
                    if old.untyped_storage()._cdata not in known:
                        old.copy_(new)
                elif isinstance(new, torch.ScriptObject):
                    # A collective's handle: the caller waited for the first one.
                    torch.distributed.distributed_c10d.Work.unbox(new).wait()

    return again


@contextlib.contextmanager
def _launches_into(trace: Trace) -> Iterator[None]:
    """Write every Triton launch into a trace."""
    if _TRITON is None:
        yield
        return
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def interpreted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            def again() -> None:
                run(self, *args, grid=grid, warmup=warmup, **kwargs)

            if trace.paused or warmup:
                return again()
            _add_launch(trace, self.fn.__name__, grid, (args, kwargs), again)
            # The interpreter computes with torch operations of its own.
            trace.paused = True
            try:
                again()
            finally:
                trace.paused = False

        patch = _replaced(InterpretedFunction, "run", interpreted)
    else:
        from triton.compiler import CompiledKernel

        metadata = CompiledKernel.launch_metadata

        # Called right before each launch, also before one of a kernel bound to its arguments.
        def compiled(self: Any, grid: Any, stream: Any, *args: Any) -> Any:
            whole = (*grid, 1, 1)[:3]
            _add_launch(trace, self.metadata.name, whole, args, lambda: self[whole](*args))
            return metadata(self, grid, stream, *args)

        patch = _replaced(CompiledKernel, "launch_metadata", compiled)
    # A remembered call would show addresses, not tensors.
    with patch, _replaced(BoundCalls, "paused", True):
        yield


def _add_launch(
    trace: Trace, name: str, grid: Any, arguments: object, again: Callable[[], None]
) -> None:
    leaves = tree_leaves(arguments)
    values = [v for v in leaves if not isinstance(v, torch.Tensor)]
    trace._add(name, [grid, *values], tensors_in(leaves), again)


@contextlib.contextmanager
def sync_debug(mode: str) -> Iterator[None]:
    """Let torch warn of host syncs, or refuse them, inside the block: "warn" or "error"."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _cuda_syncs_into(trace: Trace) -> Iterator[None]:
    """Write what torch itself calls a sync, and explicit waits, into a trace."""
    with contextlib.ExitStack() as stack:
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            noted = _noting_wait(owner, trace)
            stack.enter_context(_replaced(owner, "synchronize", noted))
        stack.enter_context(sync_debug("warn"))
        warnings.filterwarnings("always", message=f".*{_TORCH_SYNC_WARNING}")
        show = warnings.showwarning

        def note(message: Any, *rest: Any, **named: Any) -> None:
            if _TORCH_SYNC_WARNING in str(message):
                trace.syncs.append(Event(trail(), "torch waits for the device"))
            else:
                show(message, *rest, **named)

        # Put back by the catch_warnings of sync_debug.
        warnings.showwarning = note
        yield


def _noting_wait(owner: Any, trace: Trace) -> Callable[..., Any]:
    wait = owner.synchronize

    def noted(*args: Any, **kwargs: Any) -> Any:
        trace.syncs.append(Event(trail(), f"{owner.__name__}.synchronize() waits for the device"))
        return wait(*args, **kwargs)

    return noted


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _syncs(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether an operation waits for the device."""
    if name == "aten.index" and len(args) > 1:
        # A mask as index: how many rows it selects is known to the device only.
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    if name == "aten.repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _SYNCING_OPS


def _impossible_collective(name: str, args: tuple, kwargs: dict) -> Iterator[Event]:
    """Yield why no graph can hold this collective, if none can."""
    if name in ("c10d.barrier", "c10d.monitored_barrier_"):
        yield Event(trail(), f"{name} makes the host wait for every rank")
        return
    leaves = tree_leaves((args, kwargs))
    devices = {t.device for t in tensors_in(leaves)}
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            # Reduce operations are script objects too, and no group.
            with contextlib.suppress(RuntimeError):
                group = torch.distributed.ProcessGroup.unbox(leaf)
                for backend in {group._get_backend(device).name() for device in devices}:
                    if backend in _HOST_BACKENDS:
                        yield Event(trail(), f"{name} runs on the host: its backend is {backend}")


def _as_value(value: object) -> object:
    """Return what of a value passed to a call can be compared between runs."""
    plain = int | float | str | tuple | torch.dtype | torch.device | torch.layout | None
    # As text: NaN equals NaN then, and True is not 1.
    return repr(value) if isinstance(value, plain) else type(value).__name__
