// Where each node and slot is drawn. Pure: sizes in, numbers out, all in pixels of the stage.
//
// Nodes are lines, grouped by rack. Few nodes get high, wide cells and no more room than they need; many
// are laid in several bands side by side, as many as make the cells largest, so that a whole fleet is
// seen at once without scrolling.
const MAX_CELL_WIDTH = 240;
const MAX_CELL_HEIGHT = 48;
const NAME_MIN_HEIGHT = 13;
const RACK_LINE_HEIGHT = 24;
const HEAD_HEIGHT = 20;
const HEAD_MIN_WIDTH = 18;
const MIN_LABELS = 40;
const MAX_LABELS = 168;
const MAX_LABEL_SHARE = 0.35;
const MAX_BANDS = 24;

// `labels`: width that the names of nodes and of racks want, `{ nodes, racks }`. `height` is the most
// that the stage may take; the plan's own height says what it takes.
export function arrange(rows, slots, width, height, labels) {
  const lines = linesOf(rows);
  if (!lines.length || slots < 1 || width < 1 || height < 1) return null;
  let best = null;
  for (let bands = 1; bands <= Math.min(MAX_BANDS, lines.length); bands += 1) {
    const tried = sizes(lines, slots, bands, { width, height, labels });
    if (best === null || tried.score > best.score * 1.05) best = tried;
  }
  return place(best, lines, slots);
}

// Indexes of rows; -1 is the line above a rack that carries its name (or only keeps racks apart).
function linesOf(rows) {
  const lines = [];
  const many = rows.some((row) => row.rack !== rows[0].rack);
  rows.forEach((row, index) => {
    if (many && (index === 0 || row.rack !== rows[index - 1].rack)) lines.push(-1);
    lines.push(index);
  });
  return lines;
}

function sizes(lines, slots, bands, { width, height, labels }) {
  const perBand = Math.ceil(lines.length / bands);
  const bandWidth = width / bands;
  // In one band the lines of racks need not be as high as cells; beside other bands they line up.
  const racks = bands === 1 ? lines.filter((row) => row < 0).length : 0;
  const free = height - HEAD_HEIGHT;
  const spread = (free - racks * RACK_LINE_HEIGHT) / (perBand - racks);
  const even = spread > RACK_LINE_HEIGHT ? spread : free / perBand;
  const cellHeight = Math.min(MAX_CELL_HEIGHT, even);
  const wanted = cellHeight >= NAME_MIN_HEIGHT ? Math.max(labels.nodes, racks ? labels.racks : 0) : labels.racks;
  const label = Math.min(Math.max(MIN_LABELS, wanted), MAX_LABELS, bandWidth * MAX_LABEL_SHARE);
  const cellWidth = Math.min(MAX_CELL_WIDTH, (bandWidth - label) / slots);
  const rackHeight = racks && cellHeight > RACK_LINE_HEIGHT ? RACK_LINE_HEIGHT : cellHeight;
  return { score: Math.min(cellWidth, cellHeight * 1.6), bands, perBand, cellHeight, cellWidth, label, rackHeight };
}

function place(best, lines, slots) {
  const { bands, perBand, cellHeight, cellWidth, label } = best;
  const head = cellWidth >= HEAD_MIN_WIDTH ? HEAD_HEIGHT : 0;
  const bandWidth = label + slots * cellWidth;
  const tops = [head];
  for (let line = 0; line < perBand; line += 1) {
    tops.push(tops[line] + (bands === 1 && lines[line] < 0 ? best.rackHeight : cellHeight));
  }
  const lefts = [];
  for (let band = 0; band < bands; band += 1) {
    lefts.push(band * bandWidth);
    for (let slot = 0; slot < slots; slot += 1) lefts.push(band * bandWidth + label + slot * cellWidth);
  }
  lefts.push(bands * bandWidth);
  const spots = [];
  const headers = [];
  const rowAt = new Map();
  lines.forEach((row, at) => {
    const spot = { line: at % perBand, column: Math.floor(at / perBand) * (slots + 1) + 1 };
    if (row < 0) return headers.push({ ...spot, row: lines[at + 1] });
    spots[row] = spot;
    return rowAt.set(spot.line * lefts.length + spot.column, row);
  });
  return {
    slots, bands, spots, headers, rowAt, tops, lefts, head, label, cellWidth, cellHeight,
    width: lefts.at(-1),
    height: tops.at(-1),
    named: cellHeight >= NAME_MIN_HEIGHT,
  };
}

// The cell under a point of the stage, or null.
export function cellAt(plan, x, y) {
  const column = before(plan.lefts, x);
  const line = before(plan.tops, y);
  if (column === null || line === null) return null;
  const slot = (column % (plan.slots + 1)) - 1;
  const row = plan.rowAt.get(line * plan.lefts.length + column - slot);
  return slot < 0 || row === undefined ? null : row * plan.slots + slot;
}

// Which of the spans between edges a coordinate is in, or null.
function before(edges, at) {
  const beyond = edges.findIndex((edge) => edge > at);
  return beyond < 1 ? null : beyond - 1;
}

// Left, top, width and height of a cell in the stage.
export function boxOf(plan, cell) {
  const { line, column } = plan.spots[Math.floor(cell / plan.slots)];
  return {
    left: plan.lefts[column + (cell % plan.slots)],
    top: plan.tops[line],
    width: plan.cellWidth,
    height: plan.tops[line + 1] - plan.tops[line],
  };
}
