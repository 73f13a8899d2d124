"""Plans against cases that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import CapacityError, ConfigError, TraceError
from octavo.lab.capacity import Load, Placement, arithmetic, capacity_of, cdiv_up
from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts, StepCosts, StepShape
from octavo.lab.examiner import Examiner
from octavo.lab.gpus import find_gpu
from octavo.lab.limits import LOADS, Limits, waiting_of
from octavo.lab.machine import GpuMachine, HalfKVCosts
from octavo.lab.plan_report import Plan
from octavo.lab.planner import find_answer
from octavo.lab.results import PoolSample, RequestTimes, SimResult
from octavo.lab.search import Answer, PlanOptions
from octavo.lab.shapes import find_shape
from octavo.lab.slices import Slice, busiest
from octavo.lab.trace import TraceRequest
from octavo.lab.trials import ScaledCosts, Slo, Trials, measure

STEADY = FixedCosts(0.01, 0.0, 0.0)
"""Every step takes 10 ms, whatever is in it."""
BY_TOKEN = FixedCosts(0.001, 0.001, 0.0)
"""1 ms, and 1 ms for every token."""


class Box:
    """GPUs of 1 MB; a model of `weights` bytes whose KV takes `token_bytes` a token."""

    name = "a model in a box"

    def __init__(
        self,
        costs: StepCosts,
        *,
        weights: int = 400_000,
        token_bytes: int = 100,
        degrees: Sequence[int] = (1,),
    ) -> None:
        self._costs, self._weights, self._token_bytes = costs, weights, token_bytes
        self._degrees = degrees

    def degrees(self) -> Sequence[int]:
        return self._degrees

    def place(self, num_gpus: int, block_size: int, *, half_kv: bool = False) -> Placement:
        left = 1_000_000 * num_gpus - self._weights
        if left < self._token_bytes * block_size:
            raise CapacityError(f"{self._weights:,} B of weights do not fit")
        return Placement(
            num_gpus=num_gpus,
            costs=self._costs if num_gpus == 1 else ScaledCosts(self._costs, 1 / num_gpus),
            pool_bytes=left,
            token_bytes=self._token_bytes // (2 if half_kv else 1),
            arithmetic=(f"{1_000_000 * num_gpus:,} - {self._weights:,} = {left:,} B",),
        )


def even(rate: float, num: int = 400, prompt: int = 100, output: int = 100) -> list[TraceRequest]:
    return [
        TraceRequest(num_input=prompt, num_output=output, arrival_s=i / rate) for i in range(num)
    ]


def options(ttft_s: float = 2.0, tpot_s: float = 0.05, **further: Any) -> PlanOptions:
    values: dict[str, Any] = {"max_model_len": 1024, "replica_requests": 180} | further
    return PlanOptions(slo=Slo(ttft_s, tpot_s), **values)


def limits_of(answer: Answer, trials: Trials, machine: Box, chosen: PlanOptions) -> Limits:
    return Examiner(answer, machine, chosen, trials).limits()


# -- arithmetic


def test_capacity_by_hand() -> None:
    """600,000 B / 100 B = 6,000 slots; a sequence of the batch holds 100 + 100 / 2 tokens and half
    a block: 5,940 / 158 = 37.6; 37 of them end every 100 x 10 ms."""
    part = busiest(even(10.0), None)
    found = capacity_of(
        Box(STEADY).place(1, 16), part, ttft_s=0.5, tpot_s=0.05, percentile=95.0, block_size=16
    )
    assert found.placement.num_slots == 6000 and found.placement.num_blocks(16) == 375
    assert found.load == Load(input=100, output=100, seqs=1, context=150, computed=100, read=150)
    assert (found.by_memory, found.batch) == (37, 37)
    assert found.rate == pytest.approx(37.0)
    assert found.likely_rate == pytest.approx(0.98 * 37.0), "a prompt takes 10 ms of 500"
    assert found.alone_tpot_s == found.alone_ttft_s == 0.01
    # Little: 10 a second, each for 100 steps of 10 ms
    assert found.in_flight(10.0) == 10
    lines = arithmetic(found, rate=100.0, num_replicas=3, tpot_s=0.05)
    assert lines[0] == "1,000,000 - 400,000 = 600,000 B"
    assert any("375 blocks of 16" in line for line in lines)
    assert any("100 of them need at least 3 replicas" in line for line in lines)
    assert lines[-1].endswith("33 sequences in flight in each")


def test_capacity_by_tpot() -> None:
    """1 + B ms and, with a prompt of 10 in every B / 100 of the steps, B / 10 ms more."""
    part = busiest(even(5.0, prompt=10), None)
    found = capacity_of(
        Box(BY_TOKEN, token_bytes=2).place(1, 16),
        part,
        ttft_s=0.5,
        tpot_s=0.0451,
        percentile=95.0,
        block_size=16,
    )
    assert found.by_tpot == found.batch == 40
    assert found.step_s == pytest.approx(0.045)
    assert found.rate == pytest.approx(40 / (100 * 0.045))


def test_long_outputs_weigh_by_the_time_they_stay() -> None:
    """A request of 300 tokens is in the batch three times as long as one of 100."""
    requests = [
        TraceRequest(num_input=0 + 10, num_output=100, arrival_s=0.0),
        TraceRequest(num_input=10, num_output=300, arrival_s=1.0),
    ]
    load = Load.of(Slice(requests, 0, 2, 1.0, 1.0))
    assert load.context == pytest.approx((100 * 60 + 300 * 160) / 400)
    sampled = [replace(request, n=2) for request in requests]
    twice = Load.of(Slice(sampled, 0, 2, 1.0, 1.0))
    assert (twice.output, twice.seqs) == (200, 2) and twice.context == load.context


@pytest.mark.parametrize(
    ("amount", "each", "num"), [(3, 1, 3), (3.1, 1, 4), (0.2, 5, 1), (4, 2, 2)]
)
def test_how_many_it_takes(amount: float, each: float, num: int) -> None:
    assert cdiv_up(amount, each) == num


# -- answers


def test_a_light_workload_needs_one_gpu() -> None:
    answer, trials = find_answer(even(10.0), Box(STEADY), options())
    assert (answer.num_gpus, answer.num_replicas) == (1, 1)
    assert answer.config.num_blocks == 375
    service = answer.trial.service
    assert service.ok and service.kept == 1.0
    assert service.tpot.mean == pytest.approx(0.01)
    assert 0.01 <= service.ttft.mean <= 0.02
    assert trials.num_run <= 3 and answer.tried_fewer is None


def test_a_heavy_one_needs_three() -> None:
    """37 a second each at most, so 100 need three; two are shown to be too few where tried."""
    answer, _ = find_answer(even(100.0, num=1500), Box(STEADY), options())
    assert (answer.num_gpus, answer.num_replicas, answer.num_simulated) == (3, 3, 3)
    assert answer.trial.service.ok
    assert answer.trial.part.rate == pytest.approx(100.0)
    assert len(answer.trial.part.requests) == 3 * 180


def test_arithmetic_that_is_too_hopeful_is_corrected() -> None:
    """90 come at once every 1.5 s: on average two replicas have the room, 37 each a second, but
    not for 45 at a time."""
    requests = [
        TraceRequest(num_input=100, num_output=100, arrival_s=1.5 * (i // 90)) for i in range(900)
    ]
    answer, _ = find_answer(requests, Box(STEADY), options(ttft_s=0.1, replica_requests=450))
    assert answer.capacity.least(60.0) == 2 and answer.num_replicas == 3
    assert answer.tried_fewer is not None and not answer.tried_fewer.service.ok
    smooth, _ = find_answer(even(60.0), Box(STEADY), options(ttft_s=0.1))
    assert smooth.num_replicas == 2


def test_tensor_parallelism_where_one_gpu_is_too_slow() -> None:
    """A step takes 10 ms on one GPU, 5 on two: 6 ms a token need two."""
    machine = Box(STEADY, degrees=(1, 2, 4))
    answer, _ = find_answer(even(10.0), machine, options(tpot_s=0.006))
    assert (answer.num_gpus, answer.placement.num_gpus, answer.num_replicas) == (2, 2, 1)
    one, four = answer.rejected
    assert "a step of one sequence takes 10.0 ms, and --slo-tpot is 6 ms" in one
    assert "at least 4 in all, and 2 are enough" in four


def test_tensor_parallelism_where_the_weights_need_it() -> None:
    machine = Box(STEADY, weights=1_500_000, degrees=(1, 2))
    answer, _ = find_answer(even(10.0), machine, options())
    assert (answer.placement.num_gpus, answer.num_replicas) == (2, 1)
    assert "1,500,000 B of weights do not fit" in answer.rejected[0]


@pytest.mark.parametrize(
    ("machine", "chosen", "why"),
    [
        (
            Box(STEADY, degrees=(1, 2)),
            options(tpot_s=0.004),
            "takes 5.0 ms, and --slo-tpot is 4 ms",
        ),
        (Box(STEADY), options(ttft_s=0.005), "takes 10 ms alone, and --slo-ttft is 5 ms"),
        (Box(STEADY, weights=3_000_000, degrees=(1, 2)), options(), "3,000,000 B of weights"),
        (Box(STEADY, weights=985_000), options(), "150 slots and the longest request 200 tokens"),
        (Box(STEADY), options(max_gpus=2), "at least 3 in all, and --max-gpus is 2"),
    ],
)
def test_what_no_number_of_gpus_can_do(machine: Box, chosen: PlanOptions, why: str) -> None:
    with pytest.raises(CapacityError, match=why) as refused:
        find_answer(even(100.0), machine, chosen)
    assert "no number of GPUs" in str(refused.value) and "loosen --slo-ttft" in str(refused.value)


def test_real_shapes_on_real_gpus() -> None:
    """Llama-3.1-70B in bfloat16 does not fit one H200 with any room; two or more hold it."""
    machine = GpuMachine(find_shape("llama-3.1-70b"), find_gpu("h200"))
    assert machine.degrees() == [1, 2, 4, 8]
    with pytest.raises(CapacityError, match="no room for KV"):
        machine.place(1, 16)
    two = machine.place(2, 16)
    assert two.token_bytes == 80 * 8 * 128 * 2 * 2
    usable = 2 * int(find_gpu("h200").memory_bytes * 0.9)
    assert 0.3 < two.pool_bytes / (usable - machine.shape.weight_bytes) < 1
    half = machine.place(2, 16, half_kv=True)
    assert half.num_slots == 2 * two.num_slots
    long = StepShape(0, 0, 64, 64 * 8000, 64)
    assert two.costs.step_s(long) > 1.2 * half.costs.step_s(long)
    assert half.costs.copy_s(10) == two.costs.copy_s(5)
    assert half.costs.copy_s(1) == two.costs.copy_s(1) / 2 > 0  # one block is not none
    for name in ("num_host_blocks", "num_copied_blocks"):
        for num in (1, 7):
            moved = long._replace(**{name: num})
            more_s = two.costs.step_s(moved) - two.costs.step_s(long)
            half_s = half.costs.step_s(moved) - half.costs.step_s(long)
            assert half_s == pytest.approx(more_s / 2) and half_s > 0
    assert isinstance(half.costs, HalfKVCosts) and half.costs.name.endswith("fp8 KV")


# -- what limits


@pytest.fixture(scope="module")
def tight() -> Plan:
    """30 a second where 37 are the most: steps take the same for any batch, so nothing but room for
    more sequences helps."""
    machine, chosen = Box(STEADY), options()
    answer, trials = find_answer(even(30.0), machine, chosen)
    return Plan(
        machine=machine.name,
        workload="even requests",
        part=trials.part,
        options=chosen,
        answer=answer,
        limits=limits_of(answer, trials, machine, chosen),
        num_simulations=trials.num_run,
        elapsed_s=1.0,
    )


def test_memory_is_what_limits(tight: Plan) -> None:
    limits = tight.limits
    assert tight.answer.num_gpus == 1
    gains = {q.name: q.gain for q in limits.questions}
    assert limits.limit == "memory"
    assert gains["twice the memory"] >= 0.5 and gains["twice the seats"] == 0
    assert limits.waiting.memory > 0.9 and limits.missed_ttft > 0.05
    gains = {c.name: c.gain for c in limits.changes}
    assert gains["one more GPU"] == 1.0
    assert gains["fp8 KV cache"] >= 0.5 and gains["larger token budget"] < 0.1


def test_compute_is_what_limits() -> None:
    """Room for everybody, and every token takes a millisecond."""
    machine, chosen = Box(BY_TOKEN, token_bytes=2), options()
    answer, trials = find_answer(even(6.0, num=300, prompt=10), machine, chosen)
    limits = limits_of(answer, trials, machine, chosen)
    assert limits.limit == "compute (decode)"
    gains = {q.name: q.gain for q in limits.questions}
    assert gains["twice the compute"] > 0.5 and gains["twice the memory"] == 0
    assert limits.prefill_share < 0.3
    answer, trials = find_answer(
        even(2.0, num=300, prompt=300, output=20), machine, options(2, 0.5)
    )
    assert limits_of(answer, trials, machine, options(2, 0.5)).limit == "compute (prefill)"


def test_seats_are_what_limits() -> None:
    machine, chosen = Box(STEADY, token_bytes=2), options()
    answer, trials = find_answer(even(10.0), machine, chosen)
    few = replace(answer, config=answer.config.replace(max_num_seqs=12))
    limits = limits_of(few, trials, machine, chosen)
    assert limits.limit == "queue (seats)"
    assert limits.waiting.seats > 0.9
    gains = {c.name: c.gain for c in limits.changes}
    assert gains["more seats"] >= 0.5 and gains["fp8 KV cache"] == 0


def test_bursts_are_what_limits() -> None:
    """28, 28, 4 and 4 come at once, one second after the other, and each takes 31 ms: behind two
    large bursts the last waits, though there is time for twice as many."""
    requests = [
        TraceRequest(num_input=30, num_output=1, arrival_s=float(4 * i + second))
        for i in range(10)
        for second, num in enumerate((28, 28, 4, 4))
        for _ in range(num)
    ]
    machine, chosen = Box(BY_TOKEN, token_bytes=2), options(1.0, 1.0, replica_requests=320)
    answer, trials = find_answer(requests, machine, chosen)
    limits = limits_of(answer, trials, machine, chosen)
    assert limits.limit == "queue (bursts)"
    gains = {q.name: q.gain for q in limits.questions}
    assert gains["even arrivals"] > 0.2 and gains["twice the memory"] == 0


def test_nothing_limits_an_idle_engine() -> None:
    machine, chosen = Box(STEADY), options()
    answer, trials = find_answer(even(1.0, 200), machine, chosen)
    limits = limits_of(answer, trials, machine, chosen)
    assert limits.limit == "nothing" and limits.load == LOADS[-1] and not limits.changes


def test_without_time_the_answer_says_what_it_is_less_sure_of() -> None:
    """Two simulations find a number that is enough; nothing is refined, or asked."""
    machine, chosen = Box(STEADY), options(0.1, limit_s=0.0, replica_requests=900)
    bursts = [
        TraceRequest(num_input=100, num_output=100, arrival_s=1.5 * (i // 180)) for i in range(1800)
    ]
    answer, trials = find_answer(bursts, machine, chosen)
    assert answer.trial.service.ok and trials.num_run <= 4
    (doubt,) = answer.doubts
    assert doubt.startswith(f"no time to try less than {answer.num_replicas} replicas, though more")
    limits = limits_of(answer, trials, machine, chosen)
    assert limits.limit == "not examined" and "--time-limit" in limits.why


def test_long_prompts_with_ids_are_simulated_with_fewer() -> None:
    """14,000 tokens to look up take 10 ms: 150 requests are 1.5 s. The first 13,952 are shared, so
    one replica computes them once, and can serve what it could not otherwise."""
    requests = [
        TraceRequest(num_input=14_000, num_output=10, arrival_s=i / 2.0, hash_ids=tuple(range(109)))
        for i in range(400)
    ]
    machine = Box(FixedCosts(0.001, 1e-4, 0.0), token_bytes=2)
    chosen = options(3.0, max_model_len=20_000, replica_requests=None, limit_s=0.0)
    answer, trials = find_answer(requests, machine, chosen, block_tokens=128)
    assert len(trials.part.requests) < 400
    assert any("only 152 of them" in doubt for doubt in answer.doubts)
    assert answer.capacity.load.computed == pytest.approx(48, abs=100)
    assert trials.part.new_tokens()[:3] == [14_000, 48, 48]
    assert answer.capacity.alone_ttft_s == pytest.approx(0.001 + 0.0048)


def test_no_time_for_changes() -> None:
    machine, chosen = Box(STEADY), options(limit_s=0.0)
    answer, trials = find_answer(even(30.0, 200), machine, chosen)
    limits = limits_of(answer, trials, machine, chosen)
    assert [change.name for change in limits.changes] == ["one more GPU"]
    assert "larger token budget" in limits.untried and "fp8 KV cache" in limits.untried


def sample(num_running: int, num_waiting: int, free: int) -> PoolSample:
    return PoolSample(0.0, num_running, num_waiting, 1000 - free, 0, 0, 0, 0, free, 0, 0)


def test_what_waited_for_what() -> None:
    config = SimConfig(num_blocks=100, block_size=10, max_num_seqs=8, watermark=0.01)
    samples = [
        sample(8, 6, 500),  # all seats are taken
        sample(5, 3, 119),  # room for 100 + 10, and 10 stay free: 120
        sample(5, 1, 120),
        sample(2, 0, 900),
    ]
    waiting = waiting_of(samples, config, mean_prompt=100)
    assert (waiting.seats, waiting.memory, waiting.compute) == (0.6, 0.3, 0.1)
    assert waiting.mean == 2.5
    assert waiting_of([], config, 100).mean == 0.0


def test_a_plan_adds_up_and_reads_well(tight: Plan) -> None:
    assert sum(tight.memory().values()) == pytest.approx(1.0)
    text = str(tight)
    assert max(map(len, text.splitlines())) <= 100
    for words in ("answer: 1 GPU, 1 replica", "--max-num-seqs", "Little's law", "limit: memory"):
        assert words in text
    values = tight.as_dict()
    assert values["num_gpus"] == 1 and values["limits"]["limit"] == "memory"
    assert values["load_factor"] in LOADS


# -- slices and objectives


def test_the_busiest_stretch() -> None:
    times = [0.0, 10.0, 20.0, 20.5, 21.0, 21.5, 40.0]
    requests = [
        TraceRequest(num_input=i + 1, num_output=1, arrival_s=t) for i, t in enumerate(times)
    ]
    part = busiest(requests, 4)
    assert [r.num_input for r in part.requests] == [3, 4, 5, 6]
    assert [r.arrival_s for r in part.requests] == [0.0, 0.5, 1.0, 1.5]
    assert (part.rate, part.rate_all) == (2.0, 6 / 40)
    assert str(part).startswith(
        "requests 3-6 of 7, the busiest stretch: 2 a second (all of it: 0.15"
    )
    faster = busiest(requests, 4, rate=4.0)
    assert [r.arrival_s for r in faster.requests] == [0.0, 0.25, 0.5, 0.75]
    assert [r.num_input for r in part.of_replicas(1, 2).requests] == [3, 5]
    assert [r.num_input for r in part.of_replicas(2, 3).requests] == [3, 4, 6]
    assert [r.arrival_s for r in part.evenly().requests] == [0.0, 0.5, 1.0, 1.5]


def test_a_slice_needs_a_rate() -> None:
    lengths = [TraceRequest(num_input=1, num_output=1)] * 3
    with pytest.raises(ConfigError, match="no rate is known: say --rate"):
        busiest(lengths, None)
    with pytest.raises(ConfigError, match="at one time have no rate"):
        busiest([replace(r, arrival_s=1.0) for r in lengths], None)
    with pytest.raises(ConfigError, match="--rate must be above 0"):
        busiest(even(1.0, 5), None, rate=-1.0)
    with pytest.raises(TraceError, match="no requests"):
        busiest([], None)


def result_of(times: RequestTimes, num_refused: int) -> SimResult:
    return SimResult(
        num_requests=len(times) + num_refused, num_refused=num_refused, refusals=(), times=times,
        samples=[], end_s=1.0, num_steps=1, busy_s=1.0, mean_seqs=1.0, num_preemptions=0,
        num_tokens_computed=0, num_input_tokens=0, num_output_tokens=0, num_cached_tokens=0,
        num_prompt_tokens=0, wall_s=0.0,
    )  # fmt: skip


def test_objectives_are_counted() -> None:
    """Ten requests of 11 tokens; TTFT 1 .. 10 s, then 0.1 s a token, and 0.3 s for the last."""
    times = RequestTimes()
    for i in range(10):
        times.arrival_s.append(float(i))
        times.first_token_s.append(i + (i + 1.0))
        times.finished_s.append(i + (i + 1.0) + (3.0 if i == 9 else 1.0))
        times.num_input.append(5)
        times.num_output.append(11)
        times.num_cached.append(0)
    service = measure(result_of(times, 0), Slo(8.5, 0.2, 70.0), warm_up=0.0)
    assert (service.missed_ttft, service.missed_tpot) == pytest.approx((0.2, 0.1))
    assert service.kept == pytest.approx(0.8) and service.ok
    assert service.ttft_at == pytest.approx(7.3) and service.tpot.p50 == pytest.approx(0.1)
    assert not measure(result_of(times, 0), Slo(8.5, 0.2, 95.0), warm_up=0.0).ok
    assert not measure(result_of(times, 10), Slo(8.5, 0.2, 70.0), warm_up=0.0).ok
    later = measure(result_of(times, 0), Slo(8.5, 0.2, 70.0), warm_up=0.5)
    assert later.num_measured == 5 and later.ttft.mean == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("values", "flag"),
    [((0.0, 1.0, 95.0), "--slo-ttft"), ((1.0, -1.0, 95.0), "--slo-tpot"), ((1, 1, 100), "--perc")],
)
def test_objectives_that_are_none(values: tuple[float, float, float], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Slo(*values)
