// The map of a node's KV pools: one square for each extent, or for a few of them, in the order of memory.
// Whose it is, is said by a letter and a colour; what lies in it by how strongly it is filled. Squares are
// made once for a size and changed in place; the table beside it says the same in words.
import { liveLink } from "./live.js";
import { ago, count, percent } from "./format.js";
import { Tip } from "./tip.js";

const SVG = "http://www.w3.org/2000/svg";
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
const SERIES = 6;
const FREE = 0;
const DAMAGED = 255;
const AGES = ["", "under 10 s", "under 1 min", "under 10 min", "under 1 h", "more than 1 h"];
const GAP = 2;
const SIZES = { least: 13, most: 30 };
const HEIGHTS = { narrow: 360, wide: 152 };
const NARROW = 600;
const STALE_SECONDS = 5;

// The mark of the replica in a place, counted from 0; dashboard/kv.py does the same.
export function markOf(place) {
  return { letter: LETTERS[place % LETTERS.length], series: (place % SERIES) + 1, striped: Math.floor(place / SERIES) % 2 === 1 };
}

// Side of a square such that all fit into the height that a map may take, and how many stand in a row.
export function fitSquares(total, width) {
  const height = width < NARROW ? HEIGHTS.narrow : HEIGHTS.wide;
  let size = SIZES.most;
  while (size > SIZES.least && Math.ceil(total / Math.floor((width + GAP) / (size + GAP))) * (size + GAP) > height) size -= 1;
  return { size, columns: Math.max(1, Math.floor((width + GAP) / (size + GAP))) };
}

function make(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

function set(element, key, value) {
  if (element.getAttribute(key) !== String(value)) element.setAttribute(key, value);
}

// One square: ground (cached or empty), what is live above it, a pattern, and a letter.
class Square {
  constructor(parent) {
    this.group = make("g", {}, parent);
    this.ground = make("rect", { rx: 2 }, this.group);
    this.live = make("rect", { rx: 2 }, this.group);
    this.over = make("rect", { rx: 2 }, this.group);
    this.text = make("text", {}, this.group);
    this.painted = "";
  }

  place(x, y, size) {
    Object.assign(this, { x, y, size });
    this.painted = "";
  }

  paint([owner, live, cached, age], mark, begins) {
    const looks = `${owner}/${live}/${cached}/${age}/${begins}`;
    if (looks === this.painted) return;
    this.painted = looks;
    const { x, y, size } = this;
    const owned = owner !== FREE && owner !== DAMAGED;
    for (const element of [this.ground, this.over]) for (const [key, value] of [["x", x], ["y", y], ["width", size], ["height", size]]) set(element, key, value);
    const tall = owned ? Math.round(size * live) : 0;
    for (const [key, value] of [["x", x], ["y", y + size - tall], ["width", size], ["height", tall]]) set(this.live, key, value);
    set(this.group, "class", owned ? `k${mark.series}` : "");
    set(this.ground, "class", owner === FREE ? "kv-free" : owner === DAMAGED ? "kv-damaged" : cached > 0 ? `kv-age${age || 1}` : "kv-ground");
    set(this.live, "class", "kv-live");
    set(this.over, "class", !owned ? "" : live === 0 && cached === 0 ? "kv-hollow" : mark.striped ? "kv-striped" : "");
    set(this.over, "visibility", this.over.getAttribute("class") ? "visible" : "hidden");
    set(this.text, "x", x + size / 2);
    set(this.text, "y", y + size / 2 + 0.5);
    set(this.text, "class", live >= 0.5 ? "on-live" : "");
    const said = owner === DAMAGED ? "×" : owned && begins ? mark.letter : "";
    if (this.text.textContent !== said) this.text.textContent = said;
  }
}

class PoolMap {
  constructor(holder) {
    this.caption = document.createElement("p");
    this.caption.className = "kv-words";
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("aria-hidden", "true");
    this.squares = [];
    this.layer = make("g", {}, this.svg);
    this.cursor = make("rect", { class: "kv-cursor", rx: 3, visibility: "hidden" }, this.svg);
    holder.append(this.caption, this.svg);
  }

  show(pool, firstPlace, width, several) {
    this.pool = pool;
    this.firstPlace = firstPlace;
    const total = pool.cells.length;
    const { size, columns } = fitSquares(total, width);
    Object.assign(this, { size, columns });
    const rows = Math.ceil(total / columns);
    const shape = `0 0 ${width} ${Math.max(1, rows * (size + GAP) - GAP)}`;
    if (this.svg.getAttribute("viewBox") !== shape || this.squares.length !== total) this.arrange(shape, total);
    pool.cells.forEach((cell, at) => {
      const begins = at % columns === 0 || pool.cells[at - 1][0] !== cell[0];
      this.squares[at].paint(cell, markOf(firstPlace + cell[0] - 1), begins);
    });
    const blocks = pool.cell_extents * pool.extent_blocks;
    const text = `${several ? `Pool ${pool.pool_id.slice(0, 8)}: ` : ""}${count(pool.capacity_blocks)} blocks of ${pool.block_tokens} tokens in the order of memory, ${count(blocks)} in a square`;
    if (this.caption.textContent !== text) this.caption.textContent = text;
  }

  arrange(shape, total) {
    this.svg.setAttribute("viewBox", shape);
    while (this.squares.length < total) this.squares.push(new Square(this.layer));
    for (const gone of this.squares.splice(total)) gone.group.remove();
    this.squares.forEach((square, at) => square.place((at % this.columns) * (this.size + GAP), Math.floor(at / this.columns) * (this.size + GAP), this.size));
  }

  // The square at a point of the screen; null where there is none.
  at(clientX, clientY) {
    const box = this.svg.getBoundingClientRect();
    const scale = box.width ? this.svg.viewBox.baseVal.width / box.width : 1;
    const column = Math.floor(((clientX - box.left) * scale) / (this.size + GAP));
    const row = Math.floor(((clientY - box.top) * scale) / (this.size + GAP));
    const at = row * this.columns + column;
    return column >= 0 && row >= 0 && column < this.columns && at < this.squares.length ? at : null;
  }

  point(at) {
    set(this.cursor, "visibility", at === null ? "hidden" : "visible");
    if (at === null) return;
    const { x, y, size } = this.squares[at];
    for (const [key, value] of [["x", x - 1], ["y", y - 1], ["width", size + 2], ["height", size + 2]]) set(this.cursor, key, value);
  }

  describe(at, names) {
    const pool = this.pool;
    const [owner, live, cached, age] = pool.cells[at];
    const first = at * pool.cell_extents;
    const last = first + pool.cell_extents - 1;
    const where = `${first === last ? `extent ${count(first)}` : `extents ${count(first)} to ${count(last)}`}, ${count(pool.cell_extents * pool.extent_blocks)} blocks`;
    if (owner === DAMAGED) return { title: "Damaged", value: where, lines: ["lent to nobody until the pool stands empty"] };
    const member = pool.members[owner - 1];
    if (owner === FREE || !member) return { title: "Free", value: where, lines: ["can be lent at once"] };
    const held = live + cached > 0 ? `${percent(live)} live, ${percent(cached)} in cache` : "leased, holds nothing";
    const borrowed = member.borrowed_blocks ? `holds ${count(member.borrowed_blocks)} blocks beyond what it brought` : `brought ${count(member.brought_blocks)} blocks, lends ${count(member.lent_blocks)}`;
    return {
      title: `${markOf(this.firstPlace + owner - 1).letter} · ${names[member.replica_id]?.name ?? member.replica_id.slice(0, 8)}`,
      value: held,
      lines: [where, age ? `last used ${AGES[age]} ago` : "", borrowed].filter(Boolean),
    };
  }
}

class KvMap {
  constructor(holder, link) {
    this.holder = holder;
    this.box = document.querySelector("[data-kv-box]");
    this.said = document.querySelector("[data-kv-said]");
    this.age = document.querySelector("[data-kv-age]");
    this.link = link;
    this.tip = new Tip(document.querySelector("[data-tip]"), link);
    this.told = JSON.parse(holder.dataset.told);
    this.maps = [];
    this.active = { map: 0, at: 0 };
    this.pointer = null;
    link.addEventListener("kv", ({ detail }) => { if (detail.node === holder.dataset.node) this.take(detail); });
    link.watchKv(holder.dataset.node);
    new ResizeObserver(() => { if (holder.clientWidth !== this.width) this.draw(); }).observe(holder);
    holder.addEventListener("pointermove", (event) => this.point(event));
    holder.addEventListener("pointerdown", (event) => this.point(event));
    holder.addEventListener("pointerleave", () => this.unpoint());
    holder.addEventListener("blur", () => this.unpoint());
    holder.addEventListener("focus", () => { if (holder.matches(":focus-visible")) this.showActive(); });
    holder.addEventListener("keydown", (event) => this.key(event));
    setInterval(() => this.sayAge(), 1000);
    this.draw();
  }

  get names() {
    return JSON.parse(document.querySelector("[data-kv-names]")?.dataset.kvNames ?? "{}");
  }

  take(told) {
    this.told = told;
    this.draw();
    this.sayAge();
  }

  draw() {
    const pools = this.told.pools;
    this.box.hidden = pools.length === 0;
    this.width = this.holder.clientWidth;
    if (!this.width) return;
    while (this.maps.length < pools.length) this.maps.push(new PoolMap(this.holder));
    for (const gone of this.maps.splice(pools.length)) { gone.caption.remove(); gone.svg.remove(); }
    let place = 0;
    pools.forEach((pool, at) => {
      this.maps[at].show(pool, place, this.width, pools.length > 1);
      place += pool.members.length;
    });
    if (this.pointer) this.showPointer();
  }

  sayAge() {
    if (this.told.received_at === null) return;
    const age = Math.max(0, Date.now() / 1000 + this.link.clockOffset - this.told.received_at);
    const text = age >= STALE_SECONDS ? `as of ${ago(age)}` : "live";
    if (this.age.textContent !== text) this.age.textContent = text;
    this.holder.classList.toggle("stale", age >= STALE_SECONDS);
  }

  point(event) {
    this.pointer = { x: event.clientX, y: event.clientY };
    this.showPointer();
  }

  unpoint() {
    this.pointer = null;
    this.tip.hide(this);
    this.maps.forEach((map) => map.point(null));
  }

  showPointer() {
    const { x, y } = this.pointer;
    let found = false;
    for (const map of this.maps) {
      const at = map.at(x, y);
      map.point(at);
      if (at === null) continue;
      found = true;
      this.tip.show(this, map.describe(at, this.names), x, y);
    }
    if (!found) this.tip.hide(this);
  }

  key(event) {
    const map = this.maps[this.active.map];
    if (!map) return;
    const last = map.squares.length - 1;
    const at = Math.min(this.active.at, last);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - map.columns, ArrowDown: at + map.columns, Home: 0, End: last };
    if (event.key === "Escape") this.unpoint();
    if (!(event.key in moves)) return;
    event.preventDefault();
    const to = moves[event.key];
    if (to > last && this.active.map < this.maps.length - 1) this.active = { map: this.active.map + 1, at: 0 };
    else if (to < 0 && this.active.map > 0) this.active = { map: this.active.map - 1, at: this.maps[this.active.map - 1].squares.length - 1 };
    else if (to >= 0 && to <= last) this.active.at = to;
    this.showActive();
  }

  showActive() {
    const map = this.maps[this.active.map];
    if (!map?.squares.length) return;
    const at = Math.min(this.active.at, map.squares.length - 1);
    this.maps.forEach((other) => other.point(other === map ? at : null));
    const said = map.describe(at, this.names);
    const box = map.squares[at].ground.getBoundingClientRect();
    this.tip.show(this, said, box.right, box.bottom);
    this.said.textContent = [said.title, said.value, ...said.lines].join(", ");
  }
}

// The form begins with the limits that the chosen replica has.
function setUpLimits() {
  const form = document.querySelector("[data-kv-limits]");
  form?.elements.replica.addEventListener("change", () => {
    const { minimum, ceiling } = form.elements.replica.selectedOptions[0].dataset;
    form.elements.minimum_blocks.value = minimum;
    form.elements.ceiling_blocks.value = ceiling;
  });
}

const holder = document.querySelector("[data-kv-map]");
if (holder) new KvMap(holder, liveLink());
setUpLimits();
