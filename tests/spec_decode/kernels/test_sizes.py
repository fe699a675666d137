from __future__ import annotations

import triton

from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2


def test_they_are_triton_s() -> None:
    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 2, 3, 64, 100):
            assert cdiv(number, divisor) == triton.cdiv(number, divisor)
