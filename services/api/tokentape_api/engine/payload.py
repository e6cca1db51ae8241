"""Routing replay payloads: base64 text is decoded while it comes in, its integers kept as small as they fit.

A payload may be hundreds of megabytes long, and it is decoded on the event loop, between two chunks of the
answer. So every step works on at most `BLOCK` characters, which takes well under a millisecond, and the text
itself is never held.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Any, Final, Protocol

import numpy as np
import pybase64
from numpy.lib import format as npy
from numpy.typing import NDArray

from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid

BLOCK: Final = 256 * 1024
"""Characters of base64 that are decoded at once; a multiple of 4."""

_NPY_DTYPES: Final = {"|u1", "<u2", "<i4"}


class PayloadInvalid(ValueError):
    """The payload is not what it should be; the text continues "… is"."""


class Values(Protocol):
    """The integers of a payload.

    Attributes:
        shape: what the payload itself says of its shape; None if it says nothing.
    """

    shape: tuple[int, ...] | None

    def feed(self, data: bytes) -> None:
        """Takes the next decoded bytes; the first ones are at least 3/4 of a `BLOCK`, or all."""

    def join(self) -> NDArray[Any]:
        """All values, flat, in the smallest of uint8, uint16 and int32 that holds them."""


class Narrow:
    """Values without a header.

    Args:
        dtype: theirs in the payload.
    """

    shape: tuple[int, ...] | None = None

    def __init__(self, dtype: str = "<i4") -> None:
        self._dtype = np.dtype(dtype)
        self._partial = b""
        self._blocks: list[NDArray[Any]] = []

    def feed(self, data: bytes) -> None:
        data = self._partial + data
        count, left = divmod(len(data), self._dtype.itemsize)
        self._partial = data[len(data) - left :]
        if count:
            self._blocks.append(_narrowed(np.frombuffer(data, self._dtype, count)))

    def join(self) -> NDArray[Any]:
        if self._partial:
            raise PayloadInvalid(f"not a whole number of {self._dtype.itemsize}-byte integers")
        widest = max((block.dtype for block in self._blocks), key=lambda dtype: dtype.itemsize, default="u1")
        joined = np.empty(sum(map(len, self._blocks)), widest)
        at = 0
        for block in self._blocks:
            joined[at : at + len(block)] = block
            at += len(block)
        return joined


class Npy:
    """Values in the layout of an `.npy` file, whose header says dtype and shape."""

    shape: tuple[int, ...] | None = None

    def __init__(self) -> None:
        self._values: Narrow | None = None

    def feed(self, data: bytes) -> None:
        if self._values is None:
            file = BytesIO(data)
            self._values = Narrow(self._header(file))
            data = file.read()
        self._values.feed(data)

    def join(self) -> NDArray[Any]:
        if self._values is None:
            raise PayloadInvalid("empty")
        return self._values.join()

    def _header(self, file: BytesIO) -> str:
        try:
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[
                npy.read_magic(file)
            ]
            self.shape, fortran, dtype = read(file)
        except Exception as error:  # numpy evaluates the header, and what that raises is in no list
            raise PayloadInvalid(f"not an .npy file ({error})") from error
        if fortran or dtype.str not in _NPY_DTYPES:
            order = "Fortran" if fortran else "C"
            raise PayloadInvalid(
                f"an .npy file of {dtype} in {order} order, not uint8, uint16 or int32 in C order"
            )
        return dtype.str


class Payload:
    """One base64 string of an answer, decoded while it comes in.

    Args:
        kind: its name in the answer.
        values: what takes the decoded bytes; None: nobody asked for it.
    """

    def __init__(self, kind: str, values: Values | None) -> None:
        self.kind = kind
        self._values = values
        self._characters = 0
        self._text = bytearray()
        self._is_padded = False
        self._problem: PayloadInvalid | None = None

    def feed(self, text: bytes) -> None:
        """Takes the next characters.

        Raises:
            EngineReplyInvalid: the decoded payload would be above `limits.REPLAY_BYTES`.
        """
        if self._values is None or self._problem is not None:
            return
        self._characters += len(text)
        if self._characters * 3 // 4 > limits.REPLAY_BYTES:
            raise EngineReplyInvalid(
                f"{self.kind} of one turn is above {limits.REPLAY_BYTES} bytes. Use shorter sessions, or "
                "ask for new rows only (--replay incremental)"
            )
        self._text += text
        while len(self._text) >= BLOCK:
            self._decode(self._values, BLOCK)

    def close(self) -> None:
        """No more characters follow."""
        if self._values is not None and self._text:
            self._decode(self._values, len(self._text))

    def values(self) -> tuple[NDArray[Any], tuple[int, ...] | None]:
        """The flat values, and their shape if the payload says it.

        Raises:
            PayloadInvalid: it is not base64, or not of whole integers, or its header is wrong.
        """
        if self._values is None:
            raise ValueError(f"{self.kind} was not asked for")
        if self._problem is not None:
            raise self._problem
        return self._values.join(), self._values.shape

    def _decode(self, values: Values, length: int) -> None:
        with memoryview(self._text) as view:
            block = bytes(view[:length])
        del self._text[:length]
        try:
            values.feed(self._decoded(block))
        except PayloadInvalid as problem:
            self._problem = problem
            self._text.clear()

    def _decoded(self, block: bytes) -> bytes:
        if self._is_padded:
            raise PayloadInvalid("not base64: text follows its padding")
        try:
            data = pybase64.b64decode(block, validate=True)
        except ValueError as error:
            raise PayloadInvalid(f"not base64: {error}") from error
        self._is_padded = len(data) * 4 < len(block) * 3
        return data


NewValues = Callable[[], Values]


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """A copy in the smallest of uint8, uint16 and int32 that holds it."""
    # Seen as unsigned, a negative number is greater than all others: one pass finds both ends.
    highest = int(values.view(f"<u{values.itemsize}").max())
    return values.astype(np.uint8 if highest < 2**8 else np.uint16 if highest < 2**16 else np.int32)
