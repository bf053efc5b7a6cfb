"use strict";
// The page polls /stats and draws what it gets. The key lives in this variable, and nowhere else.
let key = "";
const POLL_MS = 1000;
const NUM_POINTS = 300;  // five minutes
const byId = (id) => document.getElementById(id);
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

// ---- plots

const milliseconds = (value) => (value >= 10000 ? `${(value / 1000).toFixed(0)} s` : `${value.toPrecision(3)} ms`);
const inMilliseconds = (seconds) => (seconds === null ? null : 1000 * seconds);
const plain = (value) => String(Math.round(value * 10) / 10);
const percent = (value) => `${value < 10 ? Number(value.toPrecision(2)) : plain(value)} %`;

// Each plot: its title, how its values are written, and its lines: a name and how to read it from the stats.
const PLOTS = [
  ["ttft", "Time to first token", milliseconds, [
    ["p50", (stats) => inMilliseconds(stats.latency.ttft_s.p50)],
    ["p95", (stats) => inMilliseconds(stats.latency.ttft_s.p95)]]],
  ["tpot", "Time per token", milliseconds, [
    ["p50", (stats) => inMilliseconds(stats.latency.tpot_s.p50)],
    ["p95", (stats) => inMilliseconds(stats.latency.tpot_s.p95)]]],
  ["throughput", "Tokens per second", plain, [["", (stats) => stats.tokens.generated_per_s]]],
  ["kv", "KV cache in use", percent, [["", (stats) => 100 * stats.kv.usage_frac]]],
  ["queue", "Requests", plain, [
    ["running", (stats) => stats.requests.running],
    ["waiting", (stats) => stats.requests.waiting]]],
];

class Plot {
  constructor([id, title, write, lines]) {
    this.write = write;
    this.lines = lines.map(([name, read]) => ({ name, read, values: [] }));
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.append(title);
    this.latest = document.createElement("span");
    caption.append(this.latest);
    this.canvas = document.createElement("canvas");
    this.canvas.id = `plot-${id}`;
    this.canvas.setAttribute("role", "img");
    this.title = title;
    figure.append(caption, this.canvas);
    byId("plots").append(figure);
  }

  add(stats) {
    for (const line of this.lines) {
      line.values.push(line.read(stats));
      if (line.values.length > NUM_POINTS) line.values.shift();
    }
    this.describe();
    this.draw();
  }

  describe() {
    const parts = this.lines.map((line, index) => {
      const value = line.values[line.values.length - 1];
      const part = document.createElement("span");
      part.className = index ? "second" : "first";
      part.textContent = `${line.name} ${value === null ? "–" : this.write(value)} `;
      return part;
    });
    this.latest.replaceChildren(...parts);
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.latest.textContent}`);
  }

  draw() {
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
    const known = this.lines.flatMap((line) => line.values).filter((value) => value !== null);
    const top = Math.max(...known, 1e-9) * 1.1;
    const x = (index) => width - (this.lines[0].values.length - 1 - index) * (width / (NUM_POINTS - 1)) - 1;
    const y = (value) => height - 2 - (value / top) * (height - 18);
    context.strokeStyle = colour("--line");
    context.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const level = Math.round(y((share * top) / 1.1)) + 0.5;
      context.beginPath();
      context.moveTo(0, level);
      context.lineTo(width, level);
      context.stroke();
    }
    context.fillStyle = colour("--quiet");
    context.font = "11px system-ui, sans-serif";
    if (known.length) context.fillText(this.write(top / 1.1), 2, 11);
    this.lines.forEach((line, index) => {
      context.strokeStyle = context.fillStyle = colour(index ? "--second" : "--first");
      context.lineWidth = 2;
      context.beginPath();
      let isDrawing = false;
      line.values.forEach((value, position) => {
        if (value !== null) isDrawing ? context.lineTo(x(position), y(value)) : context.moveTo(x(position), y(value));
        isDrawing = value !== null;
      });
      context.stroke();
      const last = line.values[line.values.length - 1];
      if (last !== null) context.fillRect(width - 4, y(last) - 2, 4, 4);
    });
  }
}

const plots = PLOTS.map((described) => new Plot(described));

// ---- what is served

let shownFacts = "";

function showFacts(served) {
  if (JSON.stringify(served) === shownFacts) return;
  shownFacts = JSON.stringify(served);
  const gate = served.gate;
  document.title = `${served.model} – quantpipe`;
  byId("model").textContent = served.model;
  const chip = byId("verdict");
  chip.hidden = false;
  chip.textContent = gate ? gate.verdict : "not judged";
  chip.className = `chip ${gate ? { PASS: "good", FAIL: "bad" }[gate.verdict.split(" ")[0]] || "open" : "open"}`;
  const schemes = Object.entries(served.schemes).map(([name, count]) => `${name} (${count} layers)`).join(", ");
  const rows = [
    ["artifact", served.artifact && `${served.artifact} (${(served.artifact_digest || "").slice(0, 12)})`],
    ["scheme", served.artifact && (schemes || "not quantized")],
    ["KV cache", served.kv_cache],
    ["backend", served.backend],
    ["longest context", `${served.max_model_len} tokens`],
    ["verdict", gate ? `${gate.verdict}, ${gate.date}` : "none is known of these very files"],
    ["recipe", gate && `${gate.recipe} (${gate.recipe_digest.slice(0, 12)})`],
    ["served otherwise than judged", gate && gate.served_otherwise.join(", ")],
    ["quantpipe", served.version],
  ];
  byId("facts").replaceChildren(...described(rows));
}

function described(rows) {
  return rows.filter(([, value]) => value).flatMap(([name, value]) => {
    const term = document.createElement("dt"), detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value;
    return [term, detail];
  });
}

// ---- two arms

const seconds = (value) => (value === null ? "–" : milliseconds(inMilliseconds(value)));
const counts = (numbers) => Object.entries(numbers).map(([name, count]) => `${count} ${name}`).join(", ");

// Each column: its title, and how to read it from an arm.
const COLUMNS = [
  ["arm", (arm) => arm.label],
  ["model", (arm) => arm.name],
  ["state", (arm) => arm.health.status],
  ["restarts", (arm) => arm.health.num_restarts],
  ["share", (arm) => (arm.is_shadow ? "shadow" : percent(100 * arm.share))],
  ["verdict", (arm) => (arm.served.gate ? arm.served.gate.verdict : "not judged")],
  ["requests", (arm) => counts(arm.routed)],
  ["running, waiting", (arm) => `${arm.running}, ${arm.waiting}`],
  ["tokens", (arm) => arm.tokens.generated],
  ["first token", (arm) => seconds(arm.latency.ttft_s.p50)],
  ["per token", (arm) => seconds(arm.latency.tpot_s.p50)],
  ["KV cache", (arm) => percent(100 * arm.kv.usage_frac)],
];

function showArms(arms) {
  byId("arms").hidden = !arms.length;
  const row = (kind, values) => {
    const line = document.createElement("tr");
    for (const value of values) line.append(Object.assign(document.createElement(kind), { textContent: value }));
    return line;
  };
  const rows = arms.map((arm) => row("td", COLUMNS.map(([, read]) => read(arm))));
  arms.forEach((arm, index) => { if (arm.health.status !== "ok") rows[index].cells[2].className = "bad"; });
  byId("arms-table").replaceChildren(row("th", COLUMNS.map(([title]) => title)), ...rows);
}

function showShadow(shadow) {
  byId("shadow").hidden = !shadow;
  if (!shadow) return;
  const both = (values) => Object.entries(values).map(([arm, found]) => `${arm} ${seconds(found.p50)}`).join(", ");
  const first = shadow.first_difference_tokens;
  byId("shadow").replaceChildren(...described([
    ["requests", counts(shadow.outcomes) || "none yet"],
    ["equal texts", shadow.equal_frac !== null && `${percent(100 * shadow.equal_frac)} of ${shadow.num_equal + shadow.num_different}`],
    ["first token that differs", first.p50 !== null && `${first.p50} (median of the last minute)`],
    ["ended", counts(shadow.finish_reasons)],
    ["tokens", counts(shadow.generated_tokens)],
    ["first token", both(shadow.ttft_s)],
    ["per token", both(shadow.tpot_s)],
  ]));
}

function showState(text, isBad) {
  byId("state").textContent = text;
  byId("state").className = isBad ? "bad" : "";
}

async function poll() {
  try {
    const reply = await fetch("/stats", { headers: headers(), cache: "no-store" });
    byId("key-form").hidden = reply.status !== 401;
    if (reply.status === 401) {
      showState(key ? "this key is not known here" : "an API key is needed", true);
    } else if (!reply.ok) {
      showState(`the server answers ${reply.status}`, true);
    } else {
      const stats = await reply.json();
      showFacts(stats.served);
      showArms(stats.arms);
      showShadow(stats.shadow);
      for (const plot of plots) plot.add(stats);
      showState(`${stats.requests.open_prompts} open, ${stats.tokens.generated} tokens since the start`, false);
    }
  } catch {
    showState("the server does not answer", true);
  }
  setTimeout(poll, POLL_MS);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
});

// ---- chat

let messages = [];
let reading = null;  // the AbortController of an answer that is on its way

function addTurn(role, text) {
  const turn = document.createElement("li");
  turn.className = role;
  turn.textContent = text;
  byId("turns").append(turn);
  return turn;
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(turn) {
  const reply = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    signal: reading.signal,
    body: JSON.stringify({
      model: byId("model").textContent,
      messages,
      stream: true,
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
    }),
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  const arm = reply.headers.get("X-Quantpipe-Arm");
  if (arm) turn.title = `arm ${arm}`;
  for await (const event of eventsOf(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices.length ? event.choices[0].delta : {};
    turn.textContent += delta.content || "";
  }
}

byId("chat-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("prompt").value;
  if (reading || !text.trim()) return;
  byId("prompt").value = "";
  const conversation = messages;  // another one may be begun before this answer ends
  conversation.push({ role: "user", content: text });
  addTurn("user", text);
  const turn = addTurn("assistant", "");
  reading = new AbortController();
  byId("send").disabled = true;
  byId("stop").hidden = false;
  try {
    await answer(turn);
  } catch (error) {
    if (error.name !== "AbortError") addTurn("error", error.message);
  }
  // What came of it stays in the conversation; a question without any answer does not.
  if (turn.textContent) {
    conversation.push({ role: "assistant", content: turn.textContent });
  } else {
    conversation.pop();
    turn.remove();
  }
  reading = null;
  byId("send").disabled = false;
  byId("stop").hidden = true;
});

byId("stop").addEventListener("click", () => reading && reading.abort());
byId("clear").addEventListener("click", () => {
  if (reading) reading.abort();
  messages = [];
  byId("turns").replaceChildren();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});

poll();
