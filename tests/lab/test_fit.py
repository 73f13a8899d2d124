"""Costs fitted to measured steps: known ones are found again, and files that are none refused."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.lab.calibrated import CalibratedCosts, calibration, residuals
from octavo.lab.costs import StepShape
from octavo.lab.fit import Constants, as_constants, as_dict, fit, nonnegative
from octavo.lab.shapes import find_shape

TRUE = Constants(
    base_s=5e-3,
    prompt_step_s=1e-3,
    tokens=((0, 1e-3), (4, 4e-4), (32, 2e-4), (256, 3e-4)),
    samples=((0, 1e-4), (16, 5e-5)),
    decode_context_s=2e-6,
    prefill_context_s=3e-8,
    prompt_s=2e-4,
    host_step_s=3e-4,
    host_seq_s=1e-5,
    host_prompt_s=1e-4,
    host_token_s=3e-6,
    pool_copy_s=4e-5,
    host_copy_s=8e-5,
    jitter=1.02,
)


COPIES = ("pool copy", "to host", "from host")


def shapes() -> list[tuple[str, StepShape]]:
    found: list[tuple[str, StepShape]] = []
    for batch, context in itertools.product((1, 2, 4, 8, 16, 32, 64, 128), (32, 256, 1024)):
        found.append(("decode", StepShape(0, 0, batch, batch * context, batch)))
    for chunk, start in itertools.product((8, 16, 32, 64, 128, 256, 512), (0, 512)):
        pairs = chunk * start + chunk * (chunk + 1) // 2
        found.append(("prefill", StepShape(chunk, pairs, 0, 0, 1, num_prompts=1)))
    for batch, chunk in ((4, 60), (32, 32), (32, 224), (64, 448)):
        pairs = chunk * (chunk + 1) // 2
        mixed = StepShape(chunk, pairs, batch, batch * 128, batch + 1, num_prompts=1)
        found.append(("mixed", mixed))
    rng = random.Random(0)
    for _ in range(40):
        batch, count = rng.randint(1, 60), rng.choice((0, 0, 1, 3))
        tokens = count * rng.randint(2, 100)
        step = StepShape(
            tokens, tokens * 40, batch, batch * rng.randint(20, 400), batch, num_prompts=count
        )
        found.append(("live", step))
    for count in (1, 8, 64):
        found.append(("pool copy", StepShape(0, 0, 0, 0, 0, num_copied_blocks=count)))
        for way in COPIES[1:]:
            found.append((way, StepShape(0, 0, 0, 0, 0, num_host_blocks=count)))
    return found


def rows(noise: float = 0.0) -> list[dict[str, Any]]:
    """What would be measured where `TRUE` holds."""
    costs = CalibratedCosts(TRUE, "true", {})
    rng = random.Random(1)
    made = []
    for kind, shape in shapes():
        copies = shape.num_copied_blocks * TRUE.pool_copy_s + costs.copy_s(shape.num_host_blocks)
        seconds = (costs.step_s(shape) - copies) / TRUE.jitter + copies
        seconds *= 1 + noise * rng.uniform(-1, 1)
        host = TRUE.host_step_s + TRUE.host_prompt_s * shape.num_prompts
        host += TRUE.host_token_s * shape.num_prefill_tokens
        host += TRUE.host_seq_s * (shape.num_decodes + shape.num_prompts)
        if kind in COPIES:
            seconds -= TRUE.host_step_s
        made.append(
            dict(
                kind=kind,
                **shape._asdict(),
                seconds=seconds,
                compute_s=0.0 if kind in COPIES else seconds - host,
                copy_s=seconds if kind in COPIES[1:] else 0.0,
                num_steps=1,
                num_rounds=3,
                spread=noise,
                jitter=TRUE.jitter if kind == "live" else 1.0,
            )
        )
    return made


def file(**changes: Any) -> dict[str, Any]:
    made = calibration(
        rows(),
        model="org/some-model",
        dtype="bfloat16",
        block_size=16,
        num_threads=2,
        machine={"cpu": "some CPU, 2 cores"},
        date="2026-01-02",
    )
    return made | changes


def test_what_made_the_rows_is_found_again() -> None:
    fitted = CalibratedCosts(fit(rows()), "fitted", {})
    true = CalibratedCosts(TRUE, "true", {})
    for _, shape in shapes():
        assert fitted.step_s(shape) == pytest.approx(true.step_s(shape), rel=1e-4)
    found = fitted.constants
    assert found.decode_context_s == pytest.approx(2e-6, rel=1e-3)
    assert found.prefill_context_s == pytest.approx(3e-8, rel=1e-3)
    assert found.host_seq_s == pytest.approx(1e-5, rel=1e-3)
    assert found.host_prompt_s == pytest.approx(1e-4, rel=1e-3)
    assert found.host_token_s == pytest.approx(3e-6, rel=1e-3)
    assert (found.pool_copy_s, found.host_copy_s) == pytest.approx((4e-5, 8e-5))
    # not among the rows
    between = StepShape(300, 60_000, 50, 30_000, 53, num_prompts=3, num_host_blocks=5)
    assert fitted.step_s(between) == pytest.approx(true.step_s(between), rel=0.02)
    assert fitted.copy_s(5) == pytest.approx(4e-4)


def test_noise_does_not_lead_it_astray() -> None:
    fitted = CalibratedCosts(fit(rows(noise=0.1)), "fitted", {})
    true = CalibratedCosts(TRUE, "true", {})
    for kind, shape in shapes():
        if kind == "live":
            assert fitted.step_s(shape) == pytest.approx(true.step_s(shape), rel=0.1)
    assert all(value >= 0 for line in (fitted.constants.tokens,) for _, value in line)


def test_residuals_tell_how_far_off_it_is() -> None:
    costs = CalibratedCosts(TRUE, "true", {"block_size": 16})
    for residual in residuals(costs, rows()):
        assert residual.mean == pytest.approx(0, abs=1e-12)
    slow = [{**row, "seconds": 2 * row["seconds"]} for row in rows()]
    by_kind = {residual.kind: residual for residual in residuals(costs, slow)}
    assert by_kind["live"].total == pytest.approx(-0.5)
    assert by_kind["live"].num_rows == 40
    assert by_kind["decode"].worst == pytest.approx(0, abs=1e-12)  # of those compute_s counts


def test_nothing_costs_less_than_nothing() -> None:
    rng = np.random.default_rng(0)
    table = rng.uniform(size=(30, 6))
    true = np.array([1.0, 0.0, 2.0, 0.0, 0.5, 0.0])
    assert nonnegative(table, table @ true) == pytest.approx(true, abs=1e-9)
    # where the best would be negative, the constraint binds and the rest makes up for it
    wanted = table @ np.array([1.0, -1.0, 2.0, 0.0, 0.5, 0.0])
    found = nonnegative(table, wanted)
    assert (found >= 0).all()
    gradient = table.T @ (wanted - table @ found)
    assert (gradient <= 1e-8).all()  # no column that would help is left out
    assert gradient[found > 0] == pytest.approx(0, abs=1e-8)
    assert nonnegative(table, -np.ones(30)) == pytest.approx(np.zeros(6))


def test_a_larger_step_never_takes_less() -> None:
    costs = CalibratedCosts(fit(rows(noise=0.3)), "fitted", {})
    times = [costs.step_s(StepShape(0, 0, b, 100 * b, b)) for b in range(1, 400)]
    assert times == sorted(times)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(file()))
    costs = CalibratedCosts.load(path)
    assert costs.name == ("org/some-model in bfloat16, measured on some CPU, 2 cores on 2026-01-02")
    assert costs.block_size == 16
    assert costs.constants == fit(rows())
    assert as_constants(json.loads(json.dumps(as_dict(TRUE)))) == TRUE
    busy = StepShape(0, 0, 9, 900, 9)
    assert costs.step_s(busy) == costs.step_s(busy) > 0


def test_files_that_are_no_calibrations(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(ConfigError, match=r"cannot read the calibration .*No such file"):
        CalibratedCosts.load(path)
    constants = as_dict(TRUE)
    wrong = {
        "not JSON": "{",
        'does not say "format"': "[1, 2]",
        "does not say": "{}",
        "of version 2, and this octavo reads 1": json.dumps(file(version=2)),
        "damaged .KeyError": json.dumps({"format": "octavo calibration", "version": 1}),
        "damaged .ValueError": json.dumps(file(constants=constants | {"base_s": -1})),
        "damaged .ValueError.*nan": json.dumps(file(constants=constants | {"prompt_s": "nan"})),
        "damaged .TypeError": json.dumps(file(constants=constants | {"tokens": [1, 2]})),
        "tokens must begin at 0": json.dumps(file(constants=constants | {"tokens": [[5, 0.1]]})),
        "samples must begin at 0 and rise": json.dumps(
            file(constants=constants | {"samples": [[0, 1e-3], [8, 1.0], [4, 1e-3]]})
        ),
        "jitter must be above 0": json.dumps(file(constants=constants | {"jitter": 0})),
        "block_size must be a number of tokens, at least 1, got 0": json.dumps(file(block_size=0)),
        "at least 1, got 'x'": json.dumps(file(block_size="x")),
        "at least 1, got True": json.dumps(file(block_size=True)),
        "True is no cost": json.dumps(file(constants=constants | {"base_s": True})),
        "is not JSON": "[" * 100_000,
        "damaged .AttributeError": json.dumps(file(machine=None)),
    }
    for why, text in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            CalibratedCosts.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        CalibratedCosts.load(path)


def test_copies_to_the_host_and_back_are_two_kinds() -> None:
    """Each its own median; a block goes both ways."""
    twice = [{**r, "copy_s": 3 * r["copy_s"]} if r["kind"] == "to host" else r for r in rows()]
    assert fit(twice).host_copy_s == pytest.approx((3 * 8e-5 + 8e-5) / 2)


def test_a_calibration_is_of_its_model() -> None:
    costs = CalibratedCosts.of(file(block_bytes=16 * 23_040))
    costs.check_model(find_shape("smollm2-135m"))
    with pytest.raises(ConfigError, match=r"23,040 B of KV; those of smollm2-360m take 40,960 B"):
        costs.check_model(find_shape("smollm2-360m"))
    CalibratedCosts.of(file()).check_model(find_shape("smollm2-360m"))  # it does not tell


def test_prompts_that_were_never_served_are_no_free_ones() -> None:
    for name, what in (("num_prompts", "prompts"), ("num_decodes", "decodes")):
        others = [row for row in rows() if row["kind"] != "live" or not row[name]]
        if name == "num_decodes":
            others += [{**row, name: 0} for row in rows() if row["kind"] == "live"]
        with pytest.raises(ConfigError, match=f"no step that was served has {what} in it"):
            fit(others)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few to fit"):
        fit([row for row in rows() if row["kind"] == "decode"])
    with pytest.raises(ConfigError, match="none are too few"):
        fit([])
