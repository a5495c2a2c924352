"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const heads = data.layers.flatMap(({ heads }, layer) => Array.from({ length: heads }, (_, head) => ({ layer, head })));
  const widest = Math.max(...data.layers.map((layer) => layer.heads));
  const prompts = data.prompts.map(({ queries, keys }) => ({ queries, keys: keys ?? queries }));
  const tables = Object.keys(data.tables);
  const last = data.steps.length - 1;
  const several = last > 0;

  // Weights -----------------------------------------------------------------------------------------------------------

  // The bytes of all checkpoints of a prompt, from base64 of deflated differences.
  async function inflate(text) {
    const letters = atob(text), packed = new Uint8Array(letters.length);
    for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    const size = bytes.length / data.steps.length;
    for (let i = size; i < bytes.length; i++) bytes[i] += bytes[i - size]; // modulo 256
    return bytes;
  }

  let records;
  try {
    records = await Promise.all(data.streams.map(inflate));
  } catch (error) {
    $("problem").textContent = `This browser cannot unpack the weights (${error.message}), so it shows a picture of them.`;
    $("problem").hidden = false;
    return;
  }

  const number = ({ layer, head }) => heads.findIndex((other) => other.layer === layer && other.head === head);

  // Calls see(query, key, byte) for each weight that is stored of a head.
  function visit(prompt, step, index, see) {
    const rows = prompts[prompt].queries.length, columns = prompts[prompt].keys.length, bytes = records[prompt];
    const kept = Math.min(data.kept, columns);
    const size = kept ? 5 * rows * kept : data.causal ? (rows * (rows + 1)) / 2 : rows * columns;
    let at = step * (bytes.length / data.steps.length) + 8 * heads.length * rows + index * size;
    if (kept) {
      const keys = at + rows * kept;
      for (let i = 0; i < rows * kept; i++) {
        const key = keys + 4 * i;  // its highest byte is 0
        see(Math.floor(i / kept), bytes[key] | (bytes[key + 1] << 8) | (bytes[key + 2] << 16), bytes[at + i]);
      }
    } else {
      for (let q = 0; q < rows; q++) for (let k = 0; k < (data.causal ? q + 1 : columns); k++) see(q, k, bytes[at++]);
    }
  }

  // All bytes of a head, row by row; 0 where none is stored.
  function dense(prompt, step, index) {
    const columns = prompts[prompt].keys.length;
    const bytes = new Uint8Array(prompts[prompt].queries.length * columns);
    visit(prompt, step, index, (q, k, byte) => (bytes[q * columns + k] = byte));
    return bytes;
  }

  // The sum and the entropy of a row, of float32.
  function statistics(prompt, step, index, query) {
    const rows = prompts[prompt].queries.length, bytes = records[prompt];
    const view = new DataView(bytes.buffer, step * (bytes.length / data.steps.length));
    const at = (2 * index * rows + query) * 4;
    return { sum: view.getFloat32(at, true), entropy: view.getFloat32(at + 4 * rows, true) };
  }

  const weight = (byte) => (byte / 255) ** 2;

  // State -------------------------------------------------------------------------------------------------------------

  const state = { prompt: 0, step: last, layer: 0, head: 0, query: 0, key: null, table: 0, sorted: false, all: false };
  let hovered = {}; // query and key under the pointer
  let cells; // of the head shown

  const value = (table, step, { layer, head }) => data.tables[tables[table]][step][layer][head];
  const current = () => prompts[state.prompt];

  function start() {
    state.table = Math.min(1, tables.length - 1); // the first after entropy
    if (state.table) {
      const size = (head) => Math.abs(value(state.table, last, head) ?? 0);
      Object.assign(state, heads.reduce((best, head) => (size(head) > size(best) ? head : best), heads[0]));
    }
    state.query = current().queries.length - 1;
  }

  // The fragment of the address: prompt, step (its number in training), layer, head, query, key.
  function recall() {
    const asked = new URLSearchParams(location.hash.slice(1)), found = {};
    for (const name of ["prompt", "layer", "head", "query", "key"]) {
      if (/^\d+$/.test(asked.get(name) ?? "")) found[name] = +asked.get(name);
    }
    const step = data.steps.findIndex((step) => `${step}` === asked.get("step"));
    if (step >= 0) found.step = step;
    return found;
  }

  function remember() {
    const { prompt, layer, head, query, key } = state;
    const kept = { prompt, step: data.steps[state.step], layer, head, query, key };
    const fragment = new URLSearchParams(Object.entries(kept).filter(([, value]) => value !== null));
    try {
      history.replaceState(null, "", `#${fragment}`);
    } catch {} // a sandboxed frame has no address
  }

  function clamp() {
    const to = (name, count) => (state[name] = Math.max(0, Math.min(count - 1, state[name])));
    to("prompt", prompts.length);
    to("step", data.steps.length);
    to("layer", data.layers.length);
    to("head", data.layers[state.layer].heads);
    to("query", current().queries.length);
    if (state.key !== null) to("key", current().keys.length);
  }

  function update(change) {
    const before = { ...state };
    Object.assign(state, change);
    clamp();
    hovered = {};
    const changed = (...names) => names.some((name) => state[name] !== before[name]);
    if (changed("prompt")) drawStrips();
    if (changed("prompt", "step")) drawThumbnails();
    if (changed("sorted") || (state.sorted && changed("table", "step"))) arrange();
    inspect();
    remember();
  }

  // Drawing -----------------------------------------------------------------------------------------------------------

  let colors; // of the 256 bytes: red, green, blue
  let packedColors; // the same, as pixels
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rgb = (byte) => `rgb(${colors[byte].join()})`;

  function readColors() {
    const stops = style("--colors").split(",").map((hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16)));
    colors = Array.from({ length: 256 }, (_, byte) => {
      const at = (byte / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
      return [0, 1, 2].map((i) => Math.round(stops[low][i] + (at - low) * (stops[low + 1][i] - stops[low][i])));
    });
    packedColors = new Uint32Array(new Uint8Array(colors.flatMap((color) => [...color, 255])).buffer);
  }

  // Black or white, whichever is easier to read on that colour.
  function ink(byte) {
    const [r, g, b] = colors[byte].map((part) => (part / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.18 ? "#fff" : "#000";
  }

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // A canvas of so many CSS pixels, sharp on every display.
  function sized(canvas, width, height) {
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    return context;
  }

  // A head on a canvas of at most limit × limit pixels, each the largest weight of its block.
  function raster(canvas, index, limit) {
    const rows = current().queries.length, columns = current().keys.length;
    const height = Math.min(rows, limit), width = Math.min(columns, limit);
    const largest = new Int16Array(height * width).fill(data.kept ? 0 : -1);
    visit(state.prompt, state.step, index, (q, k, byte) => {
      const at = Math.floor((q * height) / rows) * width + Math.floor((k * width) / columns);
      if (byte > largest[at]) largest[at] = byte;
    });
    const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    for (let y = 0, i = 0; y < height; y++) {
      for (let x = 0; x < width; x++, i++) if (largest[i] >= 0 && !(data.causal && x > y)) pixels[i] = packedColors[largest[i]];
    }
    canvas.width = width;
    canvas.height = height;
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  const format = (weight) =>
    weight >= 0.0995 ? weight.toFixed(2) : weight >= 0.00095 ? weight.toFixed(3) : weight ? "<0.001" : "0";
  const decimal = (number) => {
    if (number === null) return "–";
    const size = Math.abs(number), digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.01 ? 2 : size >= 0.0005 ? 4 : 0;
    return (size < 0.0005 ? "0" : number.toFixed(digits)).replace("-", "−");
  };
  const quoted = (token) => `\u2068“${token}”\u2069`; // isolated, so that right-to-left tokens leave the sentence in order
  const named = ({ layer, head }) => `layer ${layer}, head ${head}`;
  const stepName = (step) => data.steps[step].toLocaleString("en");

  // Heads -------------------------------------------------------------------------------------------------------------

  const buttons = heads.map((head, index) => {
    const button = make("button", { type: "button", className: "head" });
    button.append(make("canvas", { "aria-hidden": "true" }), make("span"), make("div", { className: "bar" }, make("i")));
    button.addEventListener("click", () => update(head));
    button.addEventListener("keydown", (event) => moveHead(event, index));
    return button;
  });
  let order = heads.map((_, index) => index);

  // By layer in rows, or sorted in one sequence.
  function arrange() {
    const size = (index) => Math.abs(value(state.table, state.step, heads[index]) ?? -1);
    order = heads.map((_, index) => index);
    if (state.sorted) order.sort((a, b) => size(b) - size(a) || a - b);
    const grid = $("heads"), focused = document.activeElement, columns = Math.max(widest, 3);
    grid.style.gridTemplateColumns = state.sorted
      ? `repeat(auto-fill, minmax(${widest > 8 ? 44 : 64}px, 1fr))`
      : `auto repeat(${columns}, minmax(0, 88px))`;
    const label = (name, text) => make("div", { className: name }, text);
    const names = Array.from({ length: columns }, (_, i) => label("name", i < widest ? `${widest > 8 ? "" : "head "}${i}` : ""));
    const parts = state.sorted ? [] : [label("layer", ""), ...names];
    for (const index of order) {
      const { layer, head } = heads[index];
      if (!state.sorted && !head) parts.push(label("layer", `${widest > 8 ? "" : "layer "}${layer}`));
      parts.push(buttons[index]);
      if (!state.sorted && head === data.layers[layer].heads - 1) for (let i = head + 1; i < columns; i++) parts.push(label("layer", ""));
    }
    grid.replaceChildren(...parts);
    if (buttons.includes(focused)) focused.focus();
  }

  function moveHead(event, index) {
    const { layer, head } = heads[index];
    const along = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -widest, ArrowDown: widest }[event.key];
    if (!along) return;
    event.preventDefault();
    let next;
    if (state.sorted) next = heads[order[order.indexOf(index) + Math.sign(along)]];
    else if (Math.abs(along) === 1 && event.key !== "ArrowUp" && event.key !== "ArrowDown") next = heads[index + along];
    else {
      const to = layer + Math.sign(along);
      if (data.layers[to]) next = { layer: to, head: Math.min(head, data.layers[to].heads - 1) };
    }
    if (!next) return;
    update(next);
    buttons[number(next)].focus();
  }

  function drawThumbnails() {
    const side = Math.ceil(buttons[0].firstChild.clientWidth * (window.devicePixelRatio || 1)) || 72;
    buttons.forEach((button, index) => raster(button.firstChild, index, side));
  }

  function drawNumbers() {
    const values = heads.map((head) => value(state.table, state.step, head));
    const every = data.tables[tables[state.table]].flat(2).map((number) => Math.abs(number ?? 0));
    const largest = Math.max(...every) || 1;
    buttons.forEach((button, index) => {
      const [, text, bar] = button.children, number = values[index];
      const place = state.sorted ? `${heads[index].layer}.${heads[index].head} ` : "";
      text.textContent = widest > 8 ? place : place + decimal(number);
      bar.firstChild.style.width = `${(100 * Math.abs(number ?? 0)) / largest}%`;
      bar.firstChild.className = number < 0 ? "negative" : "";
      const chosen = heads[index].layer === state.layer && heads[index].head === state.head;
      button.setAttribute("aria-pressed", chosen);
      button.tabIndex = chosen ? 0 : -1;
      button.setAttribute("aria-label", `${named(heads[index])}: ${tables[state.table]} ${decimal(number)}`);
    });
  }

  // One head ----------------------------------------------------------------------------------------------------------

  const off = make("canvas");
  let place = { left: 0, top: 0, cell: 1 }; // of the map's cells, in CSS pixels

  function layOut() {
    const { queries, keys } = current();
    const room = $("map-frame").clientWidth - 8, context = $("map").getContext("2d");
    context.font = "11px ui-monospace, monospace";
    const width = (labels) => Math.min(92, Math.max(...labels.map((label) => context.measureText(label).width))) + 8;
    let left = width(queries), bottom = width(keys);
    let cell = Math.min(30, Math.floor(Math.min((room - left) / keys.length, 560 / queries.length)));
    const words = cell >= 12;
    if (!words) {
      left = bottom = 30;
      cell = Math.min((room - left) / keys.length, Math.max(560 / queries.length, 0.2));
      if (cell > 1) cell = Math.floor(cell * 2) / 2;
    }
    if (words && bottom - 8 <= cell) bottom = 18;
    place = { left, top: 2, cell, bottom, words, width: left + cell * keys.length + 2, height: 2 + cell * queries.length + bottom };
  }

  function drawMap() {
    const { queries, keys } = current(), { left, top, cell } = place;
    const context = sized($("map"), Math.ceil(place.width), Math.ceil(place.height));
    context.imageSmoothingEnabled = false;
    context.drawImage(off, left, top, cell * keys.length, cell * queries.length);
    context.strokeStyle = style("--line");
    context.strokeRect(left - 0.5, top - 0.5, cell * keys.length + 1, cell * queries.length + 1);
    drawLabels(context, queries, keys);
    const query = hovered.query ?? state.query, key = hovered.key ?? state.key;
    context.strokeStyle = style("--accent");
    context.lineWidth = 1.5;
    context.strokeRect(left - 1, top + query * cell - 1, cell * keys.length + 2, cell + 2);
    if (key !== null) context.strokeRect(left + key * cell - 1, top - 1, cell + 2, cell * queries.length + 2);
  }

  function drawLabels(context, queries, keys) {
    const { left, top, cell, bottom, words } = place, below = top + cell * queries.length;
    const every = words ? 1 : [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * cell >= 26) ?? 1000;
    context.font = `11px ${words ? "ui-monospace, monospace" : "system-ui, sans-serif"}`;
    context.textBaseline = "middle";
    const short = (text) => ([...text].length > 12 ? `${[...text].slice(0, 11).join("")}…` : text);
    const shade = (chosen) => (context.fillStyle = style(chosen ? "--accent" : "--soft"));
    context.textAlign = "right";
    for (let q = 0; q < queries.length; q += every) {
      shade(q === (hovered.query ?? state.query));
      context.fillText(words ? short(queries[q]) : q, left - 5, top + (q + 0.5) * cell, left - 6);
    }
    for (let k = 0; k < keys.length; k += every) {
      shade(k === (hovered.key ?? state.key));
      context.save();
      context.translate(left + (k + 0.5) * cell, below + 5);
      if (words && bottom > 18) context.rotate(-Math.PI / 2);
      else context.translate(0, 7);
      context.textAlign = words && bottom > 18 ? "right" : "center";
      context.fillText(words ? short(keys[k]) : k, 0, 0, words && bottom > 18 ? bottom - 6 : undefined);
      context.restore();
    }
  }

  function drawScale() {
    const width = Math.min(300, $("map-frame").clientWidth - 8), context = sized($("scale"), width, 26);
    for (let x = 0; x < width - 20; x++) {
      context.fillStyle = rgb(Math.round((255 * x) / (width - 21)));
      context.fillRect(10 + x, 0, 1, 9);
    }
    context.fillStyle = style("--soft");
    context.textAlign = "center";
    for (const at of [0, 0.01, 0.1, 0.25, 0.5, 1]) context.fillText(`${at}`, 10 + (width - 21) * Math.sqrt(at), 22);
  }

  // Tokens ------------------------------------------------------------------------------------------------------------

  const strips = { query: $("queries"), key: $("keys") };

  function drawStrips() {
    for (const [name, strip] of Object.entries(strips)) {
      const labels = name === "query" ? current().queries : current().keys;
      strip.replaceChildren(...labels.map((label) => make("span", { role: "option", dir: "auto", textContent: label })));
    }
  }

  // Each key by its weight from the query, and each query by its weight to the key if there is one.
  function shadeStrips() {
    const columns = current().keys.length;
    const query = hovered.query ?? state.query, key = hovered.key ?? state.key;
    const shade = (name, chosen, byteAt) =>
      [...strips[name].children].forEach((token, i) => {
        const byte = byteAt(i);
        token.style.backgroundColor = byte === null ? "" : rgb(byte);
        token.style.color = byte === null ? "" : ink(byte);
        token.setAttribute("aria-selected", i === chosen);
        token.tabIndex = i === (chosen ?? 0) ? 0 : -1;
      });
    const visible = (q, k) => !(data.causal && k > q);
    shade("key", key, (k) => (visible(query, k) ? cells[query * columns + k] : null));
    shade("query", query, (q) => (key !== null && visible(q, key) ? cells[q * columns + key] : null));
  }

  for (const [name, strip] of Object.entries(strips)) {
    const at = (event) => (event.target === strip ? -1 : [...strip.children].indexOf(event.target));
    strip.addEventListener("pointerover", (event) => at(event) >= 0 && hover({ [name]: at(event) }));
    strip.addEventListener("pointerleave", () => hover({}));
    strip.addEventListener("click", (event) => {
      if (at(event) >= 0) update({ [name]: name === "key" && state.key === at(event) ? null : at(event) });
    });
    strip.addEventListener("keydown", (event) => {
      const along = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (!along) return;
      event.preventDefault();
      update({ [name]: state[name] === null ? 0 : state[name] + along });
      strip.children[state[name]].focus();
    });
  }

  function hover(at) {
    hovered = at;
    drawMap();
    shadeStrips();
    read();
  }

  // Numbers -----------------------------------------------------------------------------------------------------------

  function largestKey(query) {
    const columns = current().keys.length, row = cells.subarray(query * columns, (query + 1) * columns);
    return row.indexOf(Math.max(...row));
  }

  function read() {
    const { queries, keys } = current();
    const query = hovered.query ?? state.query, key = hovered.key ?? state.key;
    const shown = key ?? largestKey(query), byte = cells[query * keys.length + shown];
    const { sum, entropy } = statistics(state.prompt, state.step, number(state), query);
    const from = `Query ${query} ${quoted(queries[query])}`, to = `key ${shown} ${quoted(keys[shown])}`;
    const hidden = data.causal && shown > query;
    const attends = hidden ? `${from} may not attend to ${to}` : `${from} attends ${key === null ? "most " : ""}to ${to}: ${format(weight(byte))}`;
    const when = several ? `Checkpoint ${stepName(state.step)}, ${named(state)}. ` : "";
    const rest = Math.abs(sum - 1) > 0.002 ? `, their sum ${decimal(sum)}` : "";
    $("readout").textContent = `${when}${attends}. Entropy of its weights ${decimal(entropy)} nats${rest}.`;
  }

  function drawTable() {
    const { queries, keys } = current(), columns = keys.length, few = 16;
    const row = [...cells.subarray(state.query * columns, (state.query + 1) * columns)].map((byte, key) => ({ byte, key }));
    const visible = row.filter(({ byte, key }) => (data.kept ? byte : !data.causal || key <= state.query));
    visible.sort((a, b) => b.byte - a.byte || a.key - b.key);
    const bar = (byte) => {
      const filled = make("i");
      filled.style.width = `${100 * weight(byte)}%`;
      return make("div", { className: "bar" }, filled);
    };
    $("caption").textContent = `Query ${state.query} ${quoted(queries[state.query])} in ${named(state)}, largest weights first`;
    $("cells").replaceChildren(
      ...visible.slice(0, state.all ? undefined : few).map(({ byte, key }) =>
        make("tr", {}, make("th", { scope: "row" }, `${key}`), make("td", {}, make("bdi", {}, keys[key])),
          make("td", { className: "number" }, format(weight(byte))), make("td", {}, bar(byte)))),
    );
    $("all").hidden = visible.length <= few;
    $("all").textContent = state.all ? `Show ${few} keys` : `Show all ${visible.length} keys`;
    $("all").setAttribute("aria-pressed", state.all);
  }

  function inspect() {
    const index = number(state);
    cells = dense(state.prompt, state.step, index);
    raster(off, index, 1024);
    layOut();
    $("one-title").textContent = `Layer ${state.layer}, head ${state.head}`;
    $("path").textContent = data.layers[state.layer].path;
    $("numbers").replaceChildren(...tables.map((name, i) => {
      const unit = name === "entropy" ? " nats" : "";
      return make("div", {}, make("dt", {}, name), make("dd", {}, decimal(value(i, state.step, state)) + unit));
    }));
    $("map").setAttribute("aria-label", `Weights of ${named(state)}: ${current().queries.length} queries by ${current().keys.length} keys; the arrow keys choose a query and a key`);
    for (const [id, now] of [["prompt", state.prompt], ["step", state.step], ["table", state.table]]) $(id).value = now;
    $("sorted").checked = state.sorted;
    if (several) {
      $("step-shown").textContent = stepName(state.step);
      $("step").setAttribute("aria-valuetext", `step ${data.steps[state.step]}`);
    }
    drawNumbers();
    drawMap();
    shadeStrips();
    drawTable();
    read();
    if (several) tables.forEach(drawCurve);
  }

  // Training ----------------------------------------------------------------------------------------------------------

  const positive = data.steps.filter((step) => step > 0);
  const logarithmic = several && positive.length > 3 && positive[positive.length >> 1] < data.steps[last] / 6;
  const along = (step) => (logarithmic ? Math.log1p(data.steps[step] - data.steps[0]) : data.steps[step] - data.steps[0]);
  const inset = { left: 32, right: 6, top: 7, bottom: 16 };
  const across = (step, width) => inset.left + (along(step) / along(last)) * (width - inset.left - inset.right);

  const plots = tables.map((name) => {
    const canvas = make("canvas", { role: "img" }), shown = make("b");
    $("curves").append(make("figure", {}, make("figcaption", {}, make("span", {}, name), shown), canvas));
    canvas.addEventListener("click", (event) => {
      const distance = data.steps.map((_, step) => Math.abs(across(step, canvas.clientWidth) - event.offsetX));
      update({ step: distance.indexOf(Math.min(...distance)) });
    });
    return { canvas, shown };
  });

  function drawCurve(name, table) {
    const { canvas, shown } = plots[table];
    canvas.style.width = ""; // of the column
    const width = canvas.clientWidth, height = 84, context = sized(canvas, width, height);
    const every = data.tables[name].flat(2).filter((number) => number !== null);
    const low = Math.min(0, ...every), high = Math.max(...every, low + 1e-9);
    const y = (number) => inset.top + ((high - number) / (high - low)) * (height - inset.top - inset.bottom);
    const curve = (head) => {
      context.beginPath();
      data.steps.forEach((_, step) => {
        const number = value(table, step, head);
        if (number !== null) context.lineTo(across(step, width), y(number));
      });
      context.stroke();
    };
    context.strokeStyle = style("--line");
    context.strokeRect(inset.left, Math.round(y(0)) + 0.5, width - inset.left - inset.right, 0);
    context.strokeStyle = style("--faint");
    context.globalAlpha = 0.6;
    heads.forEach(curve);
    context.globalAlpha = 1;
    context.strokeStyle = context.fillStyle = style("--accent");
    context.lineWidth = 2;
    curve(state);
    const now = value(table, state.step, state), x = across(state.step, width);
    context.fillRect(x - 0.5, inset.top, 1, height - inset.top - inset.bottom);
    if (now !== null) {
      context.beginPath();
      context.arc(x, y(now), 3.5, 0, 7);
      context.fill();
    }
    context.fillStyle = style("--soft");
    context.fillText(stepName(0), inset.left, height - 3);
    context.textAlign = "right";
    for (const number of new Set([low, high])) context.fillText(decimal(number), inset.left - 4, y(number) + 4);
    context.fillText(`step ${stepName(last)}${logarithmic ? ", log" : ""}`, width - inset.right, height - 3);
    shown.textContent = decimal(now);
    canvas.setAttribute("aria-label", `${name} of ${named(state)}: ${decimal(value(table, 0, state))} at step ${stepName(0)}, ${decimal(now)} at step ${stepName(state.step)}, ${decimal(value(table, last, state))} at step ${stepName(last)}`);
  }

  let playing = null;
  function play(on) {
    clearInterval(playing);
    playing = on ? setInterval(() => (state.step < last ? update({ step: state.step + 1 }) : play(false)), 400) : null;
    $("play").textContent = on ? "Pause" : "Play";
    $("play").setAttribute("aria-pressed", on);
    if (on) update({ step: state.step < last ? state.step : 0 });
  }

  // Controls ----------------------------------------------------------------------------------------------------------

  function prepare() {
    const short = (text) => ([...text].length > 40 ? `${[...text].slice(0, 39).join("")}…` : text);
    prompts.forEach(({ queries }, i) => $("prompt").append(make("option", { value: i }, `${i}: ${short(queries.join(""))}`)));
    tables.forEach((name, i) => $("table").append(make("option", { value: i }, name)));
    $("prompt-label").hidden = prompts.length < 2;
    $("training").hidden = $("history").hidden = !several;
    $("step").max = last;
    $("views").className = widest > 8 ? "many" : "";
    $("queries-hint").textContent = "Hover or tap a query: its weights shade the keys.";
    $("keys-hint").textContent = "Hover or tap a key: the weights on it shade the queries.";
    $("note").hidden = !data.kept;
    $("note").textContent = `This page has only the largest ${data.kept} weights of each row; sums and entropies are those of whole rows.`;
    for (const id of ["prompt", "step", "table"]) $(id).addEventListener("input", () => update({ [id]: +$(id).value }));
    $("sorted").addEventListener("input", () => update({ sorted: $("sorted").checked }));
    $("all").addEventListener("click", () => update({ all: !state.all }));
    $("play").addEventListener("click", () => play(playing === null));
  }

  function listen() {
    const map = $("map");
    const cellAt = (event) => ({
      query: Math.floor((event.offsetY - place.top) / place.cell),
      key: Math.floor((event.offsetX - place.left) / place.cell),
    });
    const inside = ({ query, key }) => current().queries[query] !== undefined && current().keys[key] !== undefined;
    map.addEventListener("pointermove", (event) => hover(inside(cellAt(event)) ? cellAt(event) : {}));
    map.addEventListener("pointerleave", () => hover({}));
    map.addEventListener("click", (event) => inside(cellAt(event)) && update(cellAt(event)));
    map.addEventListener("keydown", (event) => {
      const key = state.key ?? largestKey(state.query);
      const change = {
        ArrowUp: { query: state.query - 1 }, ArrowDown: { query: state.query + 1 },
        ArrowLeft: { key: key - 1 }, ArrowRight: { key: key + 1 },
      }[event.key];
      if (!change) return;
      event.preventDefault();
      update(change);
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && update({ key: null }));
    addEventListener("hashchange", () => update(recall()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    let width = innerWidth;
    addEventListener("resize", () => innerWidth !== width && ((width = innerWidth), paint()));
  }

  function paint() {
    readColors();
    drawThumbnails();
    drawScale();
    inspect();
  }

  $("picture").hidden = true;
  $("app").hidden = false;
  start();
  Object.assign(state, recall());
  clamp();
  prepare();
  drawStrips();
  arrange();
  paint();
  listen();
  // For whoever reads the numbers from a script: rows of weights as the page shows them.
  window.attnlab = Object.freeze({
    weights(prompt, step, layer, head) {
      const columns = prompts[prompt].keys.length;
      const flat = Array.from(dense(prompt, step, number({ layer, head })), weight);
      return prompts[prompt].queries.map((_, q) => flat.slice(q * columns, (q + 1) * columns));
    },
    statistics: (prompt, step, layer, head, query) => statistics(prompt, step, number({ layer, head }), query),
    state: () => ({ ...state }),
  });
})();
