"""--costs FILE: a calibration is of a model and a block size, and copies of blocks cost the same
under every policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.lab_flags import MachineFlags
from octavo.errors import ConfigError
from octavo.lab.calibrated import CalibratedCosts
from octavo.lab.costs import StepShape

NOTHING = StepShape(0, 0, 0, 0, 0)
COPIED = NOTHING._replace(num_copied_blocks=10)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Of SmolLM2-135M in blocks of 16."""
    constants: dict[str, object] = dict.fromkeys(
        (
            "base_s", "prompt_step_s", "decode_context_s", "prefill_context_s", "prompt_s",
            "host_step_s", "host_seq_s", "host_prompt_s", "host_token_s",
        ),
        0.0,
    )  # fmt: skip
    constants |= {"base_s": 0.01, "tokens": [[0, 1e-3]], "samples": []}
    constants |= {"pool_copy_s": 1e-4, "host_copy_s": 2e-4, "jitter": 1.0}
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps(
            {
                "format": "octavo calibration", "version": 1, "model": "org/SmolLM2-135M",
                "dtype": "bfloat16", "block_size": 16, "num_threads": 1, "machine": {}, "date": "x",
                "block_bytes": 16 * 23_040, "constants": constants,
            }
        )
    )  # fmt: skip
    return str(path)


def test_copies_are_scaled_to_blocks_of_another_size(file: str) -> None:
    machine = MachineFlags(costs=file, model="smollm2-135m")
    measured = machine.step_costs(16)
    assert isinstance(measured, CalibratedCosts)
    larger = machine.step_costs(64)
    assert larger.name == f"{measured.name}, for blocks of 64"
    assert larger.copy_s(3) == pytest.approx(4 * measured.copy_s(3)) == pytest.approx(24e-4)
    assert (
        larger.step_s(COPIED) == pytest.approx(4 * measured.step_s(COPIED)) == pytest.approx(4e-3)
    )
    decodes = StepShape(0, 0, 4, 400, 4)
    assert larger.step_s(decodes) == measured.step_s(decodes) == pytest.approx(0.014)


def test_a_calibration_of_another_model_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match=r"calibration of org/SmolLM2-135M.*those of opt-13b"):
        MachineFlags(costs=file, model="opt-13b").step_costs(16)
    assert MachineFlags(costs=file).step_costs(16).step_s(COPIED) > 0  # nothing is said


def test_copies_cost_the_same_whether_kernels_read_blocks_or_not() -> None:
    machine = MachineFlags(gpu="h200", model="opt-13b")
    paged, whole = machine.step_costs(32), machine.step_costs(32, in_one_piece=True)
    assert paged.step_s(COPIED) == whole.step_s(COPIED) > 0
    assert paged.copy_s(3) == whole.copy_s(3)
    decodes = StepShape(0, 0, 64, 64 * 500, 64)
    assert paged.step_s(decodes) > whole.step_s(decodes)
