// The page: its sources, its clock (live, paused, scrubbed), its theme, and the way in.

import { Palette } from "./colours.js";
import { summary } from "./frames.js";
import { seconds } from "./format.js";
import { Panel } from "./panel.js";
import { Source } from "./source.js";

const base = new URL(".", import.meta.url);
const byId = (id) => document.getElementById(id);
const SAY_EVERY_MS = 15000;
const LEAST_HZ = 0.1, MOST_HZ = 10; // frames a second that a server gives

class Page {
  constructor() {
    this.palette = new Palette(document.body);
    this.panels = [];
    this.anchor = null; // paused: the newest time when that began
    this.time = null; // paused: the time that is looked at
    this.saidAt = -Infinity;
    this.nextDraw = null;
    this.statuses = new Map();
  }

  async open() {
    const answer = await fetch(new URL("sources", base)).catch(() => null);
    if (answer?.status === 401) return this.askForKey();
    let sources = [{ name: "octavo", frames: "frames" }];
    if (answer?.ok) sources = await answer.json();
    else if (answer?.status !== 404) {
      this.status(null, "lost", "Connection lost, reconnecting…");
      setTimeout(() => this.open(), 2000);
      return;
    }
    for (const panel of this.panels) panel.source.close();
    this.panels = sources.map((source) => this.#panel(source));
    const root = byId("panels");
    root.dataset.num = this.panels.length;
    root.replaceChildren(...this.panels.map((panel) => panel.root));
    for (const panel of this.panels) panel.source.open();
  }

  #panel({ name, frames, block = "block/" }) {
    const url = new URL(frames, base);
    const hz = Number(new URLSearchParams(location.search).get("hz"));
    if (hz > 0) url.searchParams.set("hz", Math.min(MOST_HZ, Math.max(LEAST_HZ, hz)));
    const panel = new Panel(name, new URL(block, base).href, this.palette, {
      onSeek: (time) => this.seek(time),
      onStale: () => this.wake(),
    });
    panel.source = new Source(url, new URL("sources", base), {
      onFrame: (frame) => {
        const isTaken = panel.take(frame);
        if (this.anchor === null) this.#clock();
        return isTaken;
      },
      onStatus: (status, text) => {
        panel.status(status, text);
        this.status(panel, status, text);
      },
      onLogin: () => this.askForKey(),
    });
    return panel;
  }

  /** The worst of the sources is what the page says. */
  status(panel, status, text) {
    if (panel === null) this.statuses.clear();
    this.statuses.set(panel, [status, text]);
    if (panel !== null) this.statuses.delete(null);
    const order = ["lost", "connecting", "live", "finished"];
    const all = [...this.statuses.values()];
    const [worst, said] = all.sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]))[0];
    byId("status").dataset.status = worst;
    if (byId("status").textContent !== said) byId("status").textContent = said;
  }

  askForKey() {
    this.status(null, "lost", "A key is needed");
    if (!byId("login").open) byId("login").showModal();
  }

  async login(event) {
    event.preventDefault();
    const body = new URLSearchParams({ key: byId("key").value });
    const answer = await fetch(new URL("login", base), { method: "POST", body }).catch(() => null);
    if (answer?.ok) {
      byId("login").close();
      byId("login-form").reset();
      byId("login-error").textContent = "";
      await this.open();
    } else {
      const isWrong = answer?.status === 401 || answer?.status === 403;
      const text = isWrong ? "That key is not right." : "No answer; try again.";
      byId("login-error").textContent = text;
    }
  }

  get newest() {
    return Math.max(...this.panels.map((panel) => panel.history.newest?.time ?? -Infinity));
  }

  get oldest() {
    return Math.min(...this.panels.map((panel) => panel.history.oldest?.time ?? Infinity));
  }

  pause() {
    if (this.anchor === null && Number.isFinite(this.newest)) {
      this.anchor = this.newest;
      this.seek(this.anchor);
    }
  }

  play() {
    this.anchor = this.time = null;
    for (const panel of this.panels) panel.seek(null);
    this.#clock();
  }

  /** Pause, and look at a time. */
  seek(time) {
    if (!Number.isFinite(this.newest)) return;
    this.anchor ??= this.newest;
    this.time = Math.min(Math.max(time, this.oldest), this.newest);
    this.anchor = Math.max(this.anchor, this.time);
    for (const panel of this.panels) panel.seek(this.time);
    this.#clock();
  }

  /** One frame back or on, of the source whose next frame is nearest. */
  step(by) {
    this.pause();
    const times = [];
    for (const { history } of this.panels) {
      if (history.length === 0) continue;
      const index = history.indexAt(this.time);
      // Before the time that is looked at, a source's own frame may already be one step back.
      const isBetween = history.frames[index].time < this.time - 1e-6;
      const next = history.frames[by < 0 && isBetween ? index : index + by];
      if (next) times.push(next.time);
    }
    if (times.length) this.seek(by > 0 ? Math.min(...times) : Math.max(...times));
  }

  #clock() {
    const isPaused = this.anchor !== null;
    document.documentElement.classList.toggle("paused", isPaused);
    const button = byId("pause");
    const text = isPaused ? "Go live" : "Pause";
    if (button.textContent !== text) button.textContent = text;
    const scrub = byId("scrub");
    const end = this.anchor ?? this.newest;
    const back = isPaused ? end - this.time : 0;
    scrub.min = -Math.max(1, Math.min(300, end - this.oldest)).toFixed(2);
    scrub.value = -back;
    const said = isPaused ? (back < 0.05 ? "paused" : `−${seconds(back)}`) : "now";
    if (byId("when").textContent !== said) byId("when").textContent = said;
    scrub.setAttribute("aria-valuetext", isPaused ? `${seconds(back)} before the pause` : "now");
  }

  theme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    this.palette = new Palette(document.body);
    for (const panel of this.panels) panel.theme(this.palette);
  }

  /** Draw at the next frame of the screen; nothing runs while nothing changes. */
  wake() {
    this.nextDraw ??= requestAnimationFrame((now) => {
      this.nextDraw = null;
      this.draw(now);
    });
  }

  draw(now) {
    for (const panel of this.panels) panel.draw();
    if (now - this.saidAt < SAY_EVERY_MS) return;
    const texts = this.panels
      .filter((panel) => panel.frame !== null)
      .map((panel) => {
        const name = this.panels.length > 1 ? `${panel.name}: ` : "";
        const { num_running: running, num_waiting: waiting } = panel.frame;
        const rest = ` ${running} running, ${waiting} waiting.`;
        return name + summary(panel.frame, panel.pool) + rest;
      });
    if (texts.length === 0) return;
    this.saidAt = now;
    byId("live").textContent = texts.join(" ");
  }
}

const stored = {
  get: () => {
    try {
      return localStorage.getItem("octavo-theme") ?? "auto";
    } catch {
      return "auto"; // storage can be forbidden
    }
  },
  set: (name) => {
    try {
      localStorage.setItem("octavo-theme", name);
    } catch {
      // It is only forgotten.
    }
  },
};

function start() {
  const page = new Page();
  byId("theme").value = stored.get();
  page.theme(stored.get());
  byId("theme").addEventListener("change", (event) => {
    stored.set(event.target.value);
    page.theme(event.target.value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    page.theme(byId("theme").value),
  );
  byId("pause").addEventListener("click", () => {
    if (page.anchor === null) page.pause();
    else page.play();
  });
  byId("back").addEventListener("click", () => page.step(-1));
  byId("forth").addEventListener("click", () => page.step(1));
  byId("scrub").addEventListener("input", (event) => {
    page.seek((page.anchor ?? page.newest) + Number(event.target.value));
  });
  byId("player").addEventListener("submit", (event) => event.preventDefault());
  byId("login-form").addEventListener("submit", (event) => page.login(event));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, button, a, dialog")) return;
    const act = {
      " ": () => byId("pause").click(),
      ",": () => page.step(-1),
      ".": () => page.step(1),
    };
    if (!(event.key in act)) return;
    event.preventDefault();
    act[event.key]();
  });
  addEventListener("resize", () => page.panels.forEach((panel) => panel.layout()));
  globalThis.octavoDashboard = page; // for a look from the browser's console
  page.open();
}

start();
