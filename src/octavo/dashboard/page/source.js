// The connection to one stream of frames: opens it, opens it again, and says how it is.

const FIRST_RETRY_S = 0.5, LONGEST_RETRY_S = 10, SILENCE_S = 6;

export class Source {
  /**
   * `onFrame(frame)` returns false when a frame is missing before that one; `onStatus(status,
   * text)` is told "connecting", "live", "lost" or "finished"; `onLogin()` that a key is needed.
   */
  constructor(url, probeUrl, { onFrame, onStatus, onLogin }) {
    Object.assign(this, { url, probeUrl, onFrame, onStatus, onLogin });
    this.stream = null;
    this.retryS = FIRST_RETRY_S;
    this.timer = null;
    this.silence = null;
    this.isLive = false;
  }

  open() {
    this.close();
    this.onStatus("connecting", "Connecting…");
    const stream = new EventSource(this.url);
    this.stream = stream;
    stream.onmessage = (message) => {
      if (stream !== this.stream) return;
      this.#heard();
      if (!this.onFrame(JSON.parse(message.data))) this.open();
    };
    stream.addEventListener("end", () => {
      this.close();
      this.onStatus("finished", "Finished");
    });
    stream.onerror = () => {
      if (stream === this.stream) this.#lost();
    };
  }

  close() {
    this.stream?.close();
    this.stream = null;
    clearTimeout(this.timer);
    clearTimeout(this.silence);
    this.isLive = false;
  }

  #heard() {
    this.retryS = FIRST_RETRY_S;
    if (!this.isLive) this.onStatus("live", "Live");
    this.isLive = true;
    clearTimeout(this.silence);
    this.silence = setTimeout(() => {
      this.isLive = false;
      this.onStatus("lost", `No frame for ${SILENCE_S} s`);
    }, SILENCE_S * 1000);
  }

  async #lost() {
    this.close();
    this.onStatus("lost", "Connection lost, reconnecting…");
    const waitS = this.retryS;
    this.retryS = Math.min(LONGEST_RETRY_S, 2 * waitS);
    try {
      const answer = await fetch(this.probeUrl);
      if (answer.status === 401) return this.onLogin();
    } catch {
      // Nobody there: try again later.
    }
    if (this.stream === null) this.timer = setTimeout(() => this.open(), waitS * 1000);
  }
}
