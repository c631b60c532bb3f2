// Where each node and slot is drawn. Pure: sizes in, numbers out.
//
// Nodes are lines, grouped by rack with a gap between racks. Many nodes are laid in several bands side
// by side, as many as make the cells largest, so that a whole fleet is seen at once without scrolling.
const MAX_CELL_WIDTH = 80;
const MAX_CELL_HEIGHT = 28;
const NAME_MIN_HEIGHT = 13;
const NAMES_WIDTH = 104;
const RACKS_WIDTH = 40;
const MAX_BANDS = 24;

export function arrange(rows, slots, width, height) {
  const lines = linesOf(rows);
  if (!lines.length || slots < 1 || width < 1 || height < 1) return null;
  let best = null;
  for (let bands = 1; bands <= Math.min(MAX_BANDS, lines.length); bands += 1) {
    const perBand = Math.ceil(lines.length / bands);
    const cellHeight = Math.min(MAX_CELL_HEIGHT, height / perBand);
    const labels = Math.min(cellHeight >= NAME_MIN_HEIGHT ? NAMES_WIDTH : RACKS_WIDTH, (width / bands) * 0.4);
    const cellWidth = Math.min(MAX_CELL_WIDTH, (width / bands - labels) / slots);
    const score = Math.min(cellWidth, cellHeight * 1.6);
    if (best === null || score > best.score * 1.05) best = { score, bands, perBand, cellHeight, cellWidth, labels };
  }
  return place(best, lines, slots, width);
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

function place(best, lines, slots, width) {
  // Labels take whole columns, so cells become a little narrower for the last one to fit.
  const gap = Math.max(1, Math.ceil(best.labels / best.cellWidth));
  const columns = best.bands * (gap + slots);
  const cellWidth = Math.min(best.cellWidth, width / columns);
  const spots = [];
  const headers = [];
  lines.forEach((row, at) => {
    const spot = { line: at % best.perBand, column: Math.floor(at / best.perBand) * (gap + slots) + gap };
    if (row < 0) headers.push({ ...spot, row: lines[at + 1] });
    else spots[row] = spot;
  });
  return {
    slots,
    gap,
    spots,
    headers,
    lines: best.perBand,
    columns,
    cellWidth,
    cellHeight: best.cellHeight,
    named: best.cellHeight >= NAME_MIN_HEIGHT && best.labels > RACKS_WIDTH,
    labels: best.labels,
  };
}

// The cell under a point of the stage, or null.
export function cellAt(plan, x, y) {
  const column = Math.floor(x / plan.cellWidth);
  const line = Math.floor(y / plan.cellHeight);
  const inBand = column % (plan.gap + plan.slots);
  if (x < 0 || y < 0 || column >= plan.columns || line >= plan.lines || inBand < plan.gap) return null;
  const first = column - inBand + plan.gap;
  const row = plan.spots.findIndex((spot) => spot.line === line && spot.column === first);
  return row < 0 ? null : row * plan.slots + (inBand - plan.gap);
}

// Left, top, width and height of a cell in the stage.
export function boxOf(plan, cell) {
  const spot = plan.spots[Math.floor(cell / plan.slots)];
  return {
    left: (spot.column + (cell % plan.slots)) * plan.cellWidth,
    top: spot.line * plan.cellHeight,
    width: plan.cellWidth,
    height: plan.cellHeight,
  };
}
