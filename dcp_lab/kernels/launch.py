"""A kernel launch as a value: planned, run once, or bound to its buffers and run many times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from dcp_lab.kernels import INTERPRETED


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: A triton.jit function.
        grid: Programs, 1 to 3 dimensions.
        arguments: Every argument by name.
        options: Triton's own: num_warps, launch_pdl, ...
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, object]
    options: Mapping[str, object]

    def run(self) -> Any:
        """Launch; return the compiled kernel (None from the interpreter)."""
        return self.kernel[self.grid](**self.arguments, **self.options)

    def bind(self, *, keep: bool = True) -> Callable[[], object]:
        """Launch once, and return what launches the same again for a fraction of the host time.

        What Triton does anew in every launch (sort arguments by name, specialise on each of them,
        look up the binary) is done here once. So the arguments are fixed: the same tensors, whose
        contents may change. It goes to their device, which has to be current here, whatever
        device is current later.

        Args:
            keep: Keep the tensors alive. Without, what is returned knows addresses only, and
                whoever calls it sees to it that they hold. Default: True.
        """
        compiled = self.run()
        if INTERPRETED:
            return self.run
        run = compiled[self.grid + (1,) * (3 - len(self.grid))]
        ordered = tuple(self.arguments[name] for name in self.kernel.arg_names)
        if not keep:
            ordered = tuple(map(address, ordered))
        # Asked of torch's C functions, twice cheaper than of Triton's driver, which a stream
        # that is given leaves out: 0.1 us each.
        ours = torch.cuda.current_device()
        current, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

        def launch() -> None:
            if current() == ours:
                run(*ordered, stream=stream_of(ours))
            else:
                with torch.cuda.device(ours):
                    run(*ordered, stream=stream_of(ours))

        return launch


def address(argument: object) -> object:
    """Return a device tensor's address, which a launch takes too; anything else as it is."""
    if isinstance(argument, torch.Tensor) and argument.is_cuda:
        return argument.data_ptr()
    return argument


class Bindable(Protocol):
    """What BoundCalls takes: a Launch, or what is run and bound like one."""

    def run(self) -> object:
        """Launch."""

    def bind(self, *, keep: bool = True) -> Callable[[], object]:
        """Launch once, and return what launches the same again; see Launch.bind."""


class KnownCalls:
    """What was found out about calls before, by all that it depends on.

        key = call_key(q, k_cache, ..., softmax_scale)
        found = calls.get(key)
        if found is None:
            found = ...  # check
            calls.put(key, found)

    Args:
        most: Calls kept; one more and the oldest is forgotten. Default: 2,048, twenty calls of a
            hundred layers. An entry is a few kilobytes.

    Notes:
        A key keeps no tensor alive: it names addresses, shapes, strides and dtypes, and another
        tensor for which all of these are the same is as good. What is put must keep none either,
        but of whoever owns the calls.
    """

    def __init__(self, most: int = 2048) -> None:
        self._most = most
        self._calls: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        """Return what was put for this key, None where nothing was."""
        if key is None:
            return None
        try:
            return self._calls.get(key)
        except TypeError:
            # Something in it that no check has passed.
            return None

    def put(self, key: Hashable, found: object) -> None:
        """Keep what was found, unless the key is None."""
        if key is None:
            return
        if len(self._calls) >= self._most:
            # The oldest alone: calls whose buffers are new in every step would else take the
            # others with them, again and again.
            del self._calls[next(iter(self._calls))]
        self._calls[key] = found

    def forget(self) -> None:
        """Forget all calls: something else has changed that they depend on."""
        self._calls.clear()


class BoundCalls(KnownCalls):
    """Calls that were checked and planned before, by everything that their launches depend on.

    A model's layer makes the same call in every step: the same buffers, other contents. The first
    one is checked and planned; those after it only launch, which takes the host a fraction.

        key = call_key(q, k_cache, ..., softmax_scale)
        if calls.again(key):
            return
        ...  # check, plan
        calls.first(key, launches)
    """

    # Set while somebody watches launches and has to see the tensors of each (graphs.watch).
    paused: ClassVar[bool] = False

    def again(self, key: Hashable) -> bool:
        """Launch what a call of this key launched before; return whether there was one."""
        launches = None if self.paused else self.get(key)
        if launches is None:
            return False
        for launch in launches:
            launch()
        return True

    def first(self, key: Hashable, launches: Sequence[Bindable]) -> None:
        """Launch, on the current device, and keep what launches the same again."""
        if key is None or self.paused:
            for launch in launches:
                launch.run()
            return
        self.put(key, [launch.bind(keep=False) for launch in launches])


def call_key(*arguments: object) -> Hashable:
    """Return what tells calls apart that differ in more than contents; None to keep nothing.

    Args:
        arguments: Everything that the launches depend on: tensors, and values that hash.

    Notes:
        None under the interpreter, and where a tensor does not live on a GPU.
    """
    if INTERPRETED:
        return None
    key: list[Hashable] = []
    for argument in arguments:
        if argument is None:
            key.append(None)
        elif isinstance(argument, torch.Tensor):
            if not argument.is_cuda:
                return None
            key.append((argument.data_ptr(), argument.dtype, argument.shape, argument.stride()))
        else:
            # A bool and a float are not the int that they equal.
            key.append((type(argument), argument))
    return tuple(key)
