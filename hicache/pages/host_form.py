"""The forms that K/V can have on the host and in storage, if it is not the device's: the values of
``host_dtype``."""

from dataclasses import dataclass

from vllm_graft.base.errors import GraftError


@dataclass(frozen=True)
class HostForm:
    """A form in which each ``unit`` numbers of K/V take ``unit_bytes`` bytes."""

    name: str
    unit: int
    unit_bytes: int

    def num_bytes(self, numbers: int) -> int:
        """Bytes of so many numbers. Raises `GraftError` if they are not whole units."""
        if numbers % self.unit:
            raise GraftError(
                f"host_dtype={self.name}: K/V lies in runs of {numbers} numbers, which is no "
                f"multiple of {self.unit}. Remove host_dtype, and please report the model's name."
            )
        return numbers // self.unit * self.unit_bytes


FP8 = HostForm("fp8", 1, 1)
PACKED = HostForm("packed", 64, 99)
"""See ``copies/packed_pages.py``."""

FORMS = {form.name: form for form in (FP8, PACKED)}
