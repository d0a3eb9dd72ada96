"""NumPy, imported when a function of it is first used: `from mdsmix.lazy_numpy import NDArray, np`.

`import numpy` takes 30 ms, a sixth of a command that only compares and renders, such as `check`,
`render-yaml`, or a `convert` that has nothing to do. These commands import modules that compute
with arrays, but compute nothing. So a module that they import takes `np` from here, and writes the
dtype of a type alias as a string: `Lengths = NDArray["np.int64"]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:

    class _NumPy:
        """Has the attributes of the module `numpy`."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)  # so that Python finds it without this function
            return value

    class NDArray:
        """Takes the place of `numpy.typing.NDArray`, which only type checkers need."""

        def __class_getitem__(cls, _: Any) -> type[NDArray]:
            return cls

    np = _NumPy()

__all__ = ["NDArray", "np"]
