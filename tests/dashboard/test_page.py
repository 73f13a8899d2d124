"""The page in a real browser: what it paints, tells and remembers of the frames it is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from worlds import CACHED, EXTERNAL, FREE, USED, World

Visitor = Callable[..., Any]

BY_HAND = {
    0: (USED, 1, 1, 16), 1: (USED, 1, 1, 16), 2: (USED, 2, 1, 16), 3: (USED, 1, 1, 8),
    4: (USED, 1, 1, 0), 5: (USED, 1, 3, 16), 6: (CACHED, -1, 0, 16), 7: (EXTERNAL, -1, 0, 0),
}  # fmt: skip


def lived(num_blocks: int, num_steps: int, **options: Any) -> World:
    """A world that has gone on for a while before anybody looked."""
    world = World(num_blocks, **options)
    for _ in range(num_steps):
        world.step()
    world.events, world.changed = [], set()
    return world


def hand_made() -> World:
    world = World(64)
    for block, values in BY_HAND.items():
        world.put(block, *values)
    return world


def main_colour(cell: list[Any]) -> Any:
    """The colour that most of a cell has."""
    return max(set(cell), key=cell.count)


def test_each_kind_of_block_looks_different(visit: Visitor) -> None:
    page = visit({"one": hand_made()}).open()
    cells = page.cells(range(9))
    main = [main_colour(cell) for cell in cells]
    used, other, hollow, cached, free = (main[block] for block in (0, 2, 4, 6, 8))
    assert main[1] == used and len({used, other, hollow, cached, free}) == 5
    assert set(cells[0]) == {used}
    half, hole, shared, hatched = (cells[block] for block in (3, 4, 5, 7))
    assert 0.4 < half.count(used) / len(half) < 0.6
    assert hole[0] == hole[-1] == used and hole[len(hole) // 2] == hollow
    assert main[5] == used and shared[page.data("size") - 1] != used  # the corner
    assert free in hatched and len(set(hatched)) == 2
    assert page.errors == []


def test_a_frame_changes_the_cells_that_it_names_and_no_other(visit: Visitor) -> None:
    world = hand_made()
    page = visit({"one": world}).open()
    page.show("one")
    assert page.data("cells") == 64  # nothing changed: nothing was painted again
    world.put(20, USED, 2, 1, 16)
    world.put(6, FREE)
    page.show("one")
    assert page.data("cells") == 66
    freed, free, new = map(main_colour, page.cells([6, 8, 20]))
    assert freed == free
    world.now_s += 5  # what has just come stands out, for a moment
    page.show("one")
    settled, old = map(main_colour, page.cells([20, 2]))
    assert settled == old != new


def test_what_is_cached_fades_with_age(visit: Visitor) -> None:
    world = hand_made()
    page = visit({"one": world}).open()
    world.put(30, CACHED, fill=16)
    page.show("one")
    shades = [main_colour(page.pixels(30))]
    for seconds in (11, 60):
        world.now_s += seconds
        page.show("one")
        shades.append(main_colour(page.pixels(30)))
    free = main_colour(page.pixels(8))

    def distance(shade: tuple[int, ...]) -> int:
        return sum(abs(a - b) for a, b in zip(shade, free, strict=True))

    far, nearer, nearest = map(distance, shades)
    assert far > nearer > nearest > 0


def test_texts_tell_what_the_frame_tells(visit: Visitor) -> None:
    world = lived(300, 40, rate=12)
    page = visit({"one": world}).open()
    page.play("one", 30)
    frame, used = world.frame(), world.state.count(USED)
    assert f"300 blocks: {used} used by {len(world.running)} requests" in page.text(".summary")
    assert "KV policy paged" in page.text(".facts") and "scheduling fcfs" in page.text(".facts")
    assert page.text(".t-running") == str(len(world.running))
    assert page.text(".t-waiting") == f"{len(world.waiting)} waiting"
    tokens = frame["ledger"]["tokens"] / (300 * 16)
    assert re.search(rf"tokens {100 * tokens:.0f} %", page.text(".ledger"))
    assert (
        re.fullmatch(r"[\d,]+ tok/s", page.text(".t-output")) and page.text(".t-output")[0] != "0"
    )
    median, p99 = world.latency["tpot_s"] or (0, 0)
    assert page.text(".v-tpot") == f"{1000 * median:.1f} ms, p99 {1000 * p99:.1f} ms"
    for reason, num in world.totals["misses"].items():
        assert num == 0 or f"{reason}{num}" in page.text(".misses").replace(",", "")
    assert page.text(".tiers") == "host12 held, 96 cached of 256"  # and no disk
    assert world.totals["preemptions"] > 0
    assert f"{world.totals['preemptions']} preemptions" in page.text(".events-num")
    assert "preempted (recompute)" in page.text(".event-list li")
    assert "it came last" in page.text(".event-list li")


def test_requests_are_told_with_what_they_cost_and_why_they_wait(visit: Visitor) -> None:
    world = lived(200, 60, rate=12)
    page = visit({"one": world}).open()
    page.play("one", 1)
    rows = page.page.locator(".rows tr")
    assert rows.count() == min(100, len(world.running) + len(world.waiting))
    job = world.running[0]
    shown = page.page.locator("tbody tr", has_text=re.compile(rf"req-{job.no}\b")).inner_text()
    assert f"{job.output} of {job.goal}" in shown and str(len(job.blocks)) in shown
    assert re.search(r"waiting: needs \d+ blocks, \d+ are free", page.text(".rows"))
    assert world.preempted_rows() == page.page.locator('tr[data-state="preempted"]').count()


def test_blocks_of_a_chosen_request_stand_out(visit: Visitor) -> None:
    world = lived(300, 20, rate=4)
    page = visit({"one": world}).open()
    page.play("one", 1)
    mine, other = world.running[0], world.running[-1]
    blocks = [next(b for b in job.blocks if world.owner[b] == job.no and world.fill[b] == 16)
              for job in (mine, other)]  # fmt: skip
    before = list(map(main_colour, page.cells(blocks)))
    button = page.page.locator("button.request", has_text=re.compile(rf"req-{mine.no}\b"))
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    page.wait_painted()
    after = list(map(main_colour, page.cells(blocks)))
    assert after[0] == before[0] and after[1] != before[1]


def test_pointing_at_a_block_tells_owner_age_and_tokens(visit: Visitor) -> None:
    world = hand_made()
    page = visit({"one": world}).open()
    world.put(9, USED, 7, 2, 5)
    page.show("one")
    step = page.data("pitch")
    page.page.locator("canvas.grid").hover(position={"x": 9.5 * step, "y": 0.5 * step})
    page.page.wait_for_selector(".tip .content")
    tip = page.text(".tip")
    assert "Block 9: used" in tip and "2 references" in tip and "5 of 16 slots filled" in tip
    assert "for 0 s" in tip and f"req-7 (its block 3, positions 48{DASH}52)" in tip
    assert "layers" not in tip
    assert page.text(".tip .content") == "<b>sky</b> blue"  # as text, never as markup
    assert page.server.asked_blocks == [9]
    page.page.mouse.move(1, 1)
    assert page.page.locator(".tip").is_hidden()


DASH = "\u2013"
GEMMA = (0, 512, 512, 512, 512, 512)


def test_groups_of_layers_are_told_apart(visit: Visitor) -> None:
    world = lived(300, 40, rate=12, windows=GEMMA)
    page = visit({"one": world}).open()
    page.play("one", 3)
    rows = page.page.locator(".groups tbody tr")
    told = [row.split("\t") for row in rows.all_inner_texts()]
    assert [row[:2] for row in told[:3]] == [
        ["5, 11, 17", "all"],
        [f"0{DASH}2", "last 512"],
        ["3, 4, 6", "last 512"],
    ]
    groups = world.groups()
    assert [row[2] for row in told] == [str(num) for num, _ in groups]
    assert [row[4] for row in told] == [DASH, *[str(back) for _, back in groups[1:]]]
    kib = groups[0][0] * 48
    assert told[0][3] == (f"{kib / 1024:.1f} MiB" if kib >= 1024 else f"{kib:.1f} KiB")
    page.page.click("#back")
    page.wait_painted()
    assert rows.nth(1).inner_text().split("\t")[4] == str(groups[1][1] - 7)  # as it was then


def test_a_block_tells_its_group_and_positions(visit: Visitor) -> None:
    world = World(64, windows=GEMMA)
    page = visit({"one": world}).open()
    world.put(8, USED, 7, 1, 5)
    page.show("one")
    page.page.locator("canvas.grid").hover(position={"x": 8.5 * page.data("pitch"), "y": 4})
    page.page.wait_for_selector(".tip .content")
    tip = page.text(".tip")
    assert "Holds KV of layers 3, 4, 6, which keep the last 512 tokens" in tip
    assert f"req-7 (its block 3, positions 48{DASH}52)" in tip


@pytest.mark.parametrize("windows", [(0,), (4096,)], ids=["plain", "one group"])
def test_one_group_is_told_of_where_it_has_a_window(
    visit: Visitor, windows: tuple[int, ...]
) -> None:
    page = visit({"one": lived(64, 10, windows=windows)}).open()
    page.play("one", 1)
    assert page.page.locator(".groups").is_visible() == (windows != (0,))
    assert page.errors == []


def test_pause_step_and_scrub(visit: Visitor) -> None:
    world = World(64)
    page = visit({"one": world}).open()
    for block in range(5):  # one more block is taken in each frame
        world.put(block, USED, block, 1, 16)
        page.show("one")

    def num_used() -> int:
        return int(re.findall(r"(\d+) used", page.text(".summary"))[0])

    def settle() -> int:
        page.wait_painted()
        return num_used()

    assert settle() == 5
    page.page.click("#pause")
    world.put(40, USED, 9, 1, 16)
    page.show("one")
    assert settle() == 5 and page.page.inner_text("#pause") == "Go live"
    seen = []
    for button in ("#back", "#back", "#forth"):
        page.page.click(button)
        seen.append(settle())
    assert seen == [4, 3, 4]
    taken, not_yet, free = map(main_colour, page.cells([3, 4, 50]))
    assert taken != not_yet == free
    page.page.focus("#scrub")
    page.page.keyboard.press("Home")
    assert settle() == 0 and page.page.inner_text("#when").endswith("1.3 s")
    page.page.keyboard.press("End")
    assert settle() == 5
    page.page.click("#pause")
    assert settle() == 6 and page.page.inner_text("#when") == "now"
    taken, free = map(main_colour, page.cells([40, 50]))
    assert taken != free


def test_the_past_is_the_past_as_it_was(visit: Visitor) -> None:
    """A pool played back from keyframes and changes equals the one that was shown then."""
    page = visit({"one": lived(256, 30, rate=6)}).open()
    page.play("one", 20)
    world = page.server.feeds["one"].world
    then, time_s = world.frame(full=True)["blocks"], world.now_s
    page.play("one", 70)  # longer than a keyframe's distance
    page.page.evaluate("time => octavoDashboard.seek(time)", time_s)
    found = page.page.evaluate(
        """() => {
          const { pool } = octavoDashboard.panels[0];
          const names = ["state", "owner", "refs", "fill"];
          return Object.fromEntries(names.map((name) => [name, [...pool[name]]]));
        }"""
    )
    assert found == then
    keyframes = "octavoDashboard.panels[0].history.frames.filter((one) => one.pool).length"
    assert page.page.evaluate(keyframes) >= 3


def test_history_is_bounded_in_time_and_bytes(visit: Visitor) -> None:
    page = visit({"one": World(64)}).open()
    script = """async ([seconds, budgetBytes, numFrames]) => {
      const { History } = await import("./dashboard/frames.js");
      const history = new History({ seconds, budgetBytes });
      const about = { num_blocks: 100, block_size: 16 };
      const zeros = new Array(100).fill(0);
      const all = { state: zeros, owner: zeros, refs: zeros, fill: zeros };
      history.push({ kind: "full", n: 0, time_s: 0, about, blocks: all });
      for (let n = 1; n < numFrames; n++) {
        const one = { id: [n % 100], state: [2], owner: [n], refs: [1], fill: [3] };
        history.push({ kind: "diff", n, time_s: n / 4, blocks: one, requests: [] });
      }
      const missing = history.push({ kind: "diff", n: numFrames + 1, time_s: 1e4, blocks: all });
      return [history.newest.time - history.oldest.time, history.numBytes, missing];
    }"""
    span, _, missing = page.page.evaluate(script, [60, 1 << 30, 4000])
    assert 60 <= span <= 72 and missing is False
    span, num_bytes, _ = page.page.evaluate(script, [300, 100_000, 4000])
    assert num_bytes <= 100_000 and 0 < span < 60


def test_an_event_that_is_told_twice_is_shown_once(visit: Visitor) -> None:
    world = World(64)
    page = visit({"one": world}).open()
    event = {"kind": "waited", "time_s": 99.0, "request_id": "req-1", "mode": None, "serial": 5}
    for until_s in (None, 100.4):
        world.events = [event | {"why": "needs 3 blocks", "until_s": until_s}]
        page.show("one")
    assert page.page.locator(".event-list li").count() == 1
    assert page.text(".event-list time").endswith("s ago, for 1.4 s")


def test_two_sources_side_by_side_on_one_clock(visit: Visitor) -> None:
    feeds = {"paged": lived(128, 30, rate=6), "orca-max": lived(128, 30, policy="orca-max")}
    page = visit(feeds, viewport={"width": 1250, "height": 900}).open()
    for name in feeds:
        page.play(name, 4)
    grids = [page.page.locator("canvas.grid").nth(i).bounding_box() for i in range(2)]
    assert abs(grids[0]["y"] - grids[1]["y"]) < 1  # though one summary is a line longer
    boxes = [page.page.locator(".panel").nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    assert "KV policy orca-max" in page.text(".facts", 1)
    holes = re.findall(r"(\d+) set aside but empty", page.text(".summary", 1))
    assert int(holes[0]) > 10
    world = feeds["orca-max"]
    hole = next(b for b in range(128) if world.state[b] == USED and world.fill[b] == 0)
    mine = [b for b in range(128) if world.owner[b] == world.owner[hole]]
    filled = next(b for b in mine if world.fill[b] == 16)
    empty, full = page.cells([hole, filled], 1)
    assert empty[0] == main_colour(full) != empty[len(empty) // 2 + 3]
    page.page.click("#back")
    times = page.page.evaluate("octavoDashboard.panels.map((panel) => panel.frame.time)")
    assert times[0] == times[1] == world.now_s - 0.25


def test_a_lost_connection_is_told_and_comes_back(visit: Visitor) -> None:
    world = hand_made()
    page = visit({"one": world}).open()
    page.server.is_refusing = True
    page.server.hang_up()
    page.page.wait_for_selector('#status[data-status="lost"]')
    assert "reconnecting" in page.page.inner_text("#status")
    page.server.is_refusing = False
    page.page.wait_for_selector('#status[data-status="live"]')
    opened = page.server.feeds["one"].num_opened
    world.n += 1  # one frame never arrives: a full one is asked for
    page.server.send("one", world.next_frame())
    page.wait_for(0, world.n)
    assert page.server.feeds["one"].num_opened == opened + 1
    page.server.end("one")
    page.page.wait_for_selector('#status[data-status="finished"]')
    page.page.click("#back")
    assert page.server.feeds["one"].num_opened == opened + 1


def test_an_engine_that_starts_again_has_a_new_past(visit: Visitor) -> None:
    page = visit({"one": lived(64, 40)}).open()
    page.play("one", 3)
    page.server.feeds["one"].world = World(96)  # its clock is back at the beginning
    page.server.hang_up()
    page.until("octavoDashboard.panels[0].pool.numBlocks === 96")
    assert page.page.evaluate("octavoDashboard.panels[0].history.length") == 1


def test_a_key_is_asked_for(visit: Visitor) -> None:
    page = visit({"one": hand_made()})
    page.server.key = "sesame"
    page.page.goto(page.server.url)
    page.page.fill("#key", "wrong")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("#login-error:not(:empty)")
    assert page.page.locator(".panel").count() == 0
    page.page.fill("#key", "sesame")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector('#status[data-status="live"]')
    assert page.page.locator("#login").is_hidden()
    assert "64 blocks" in page.text(".summary")


def test_a_hundred_thousand_blocks(visit: Visitor) -> None:
    """Cost follows what changed: of 100,000 cells only those are painted again."""
    world = World(100_000)
    for block in range(0, 60_000, 2):
        world.put(block, USED, block // 500, 1, 16)
    world.changed = set()
    page = visit({"one": world}).open()
    assert page.data("cells") == 100_000 and page.data("pitch") >= 2
    busy = """async () => {
      const { grid, pool } = octavoDashboard.panels[0];
      const cells = grid.drawnCells, draws = grid.draws;
      for (let i = 0; i < 60; i++) {
        for (let j = 0; j < 500; j++) {
          const block = (i * 7919 + j * 193) % 100000;
          pool.fill[block] = (pool.fill[block] + 1) % 16;
          grid.mark(block);
        }
        grid.draw(grid.nowS);
        if (i % 10 === 0) await new Promise(requestAnimationFrame);
      }
      return [grid.drawnCells - cells, grid.draws - draws];
    }"""
    num_cells, num_draws = page.page.evaluate(busy)
    assert num_draws == 60 and num_cells == 60 * 500
    assert len({colour for cell in page.cells([0, 1]) for colour in cell}) >= 2
    world.put(99_999, USED, 3, 1, 16)
    page.show("one")
    taken, free = map(main_colour, page.cells([99_999, 99_997]))
    assert taken != free
    assert page.errors == []


def test_nothing_is_fetched_from_elsewhere(visit: Visitor) -> None:
    page = visit({"one": lived(64, 10)}).open("?hz=12")
    page.play("one", 2)
    home = page.server.url.removesuffix("/dashboard")
    assert len(page.requests) > 8
    assert all(url.startswith(home) for url in page.requests)
    assert any("frames?source=0&hz=10" in url for url in page.requests)
    assert page.errors == []  # the policy forbids inline scripts and styles: none was refused
