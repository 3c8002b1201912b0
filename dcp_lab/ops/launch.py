"""A kernel launch as a value: planned, run once, or bound to its buffers and run many times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

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

    def bind(self) -> Callable[[], object]:
        """Launch once, and return what launches the same again for a fraction of the host time.

        What Triton does anew in every launch (sort arguments by name, specialise on each of them,
        look up the binary) is done here once. So the arguments are fixed: the same tensors, whose
        contents may change. It goes to their device, which has to be current here, whatever
        device is current later.
        """
        compiled = self.run()
        if INTERPRETED:
            return self.run
        run = compiled[self.grid + (1,) * (3 - len(self.grid))]
        ordered = tuple(self.arguments[name] for name in self.kernel.arg_names)
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
