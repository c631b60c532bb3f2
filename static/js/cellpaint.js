// How one cell is painted above the plot: colours of the scales, and marks for what is not a value.
const SCALES = {
  cividis: ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "fee838"],
  viridis: ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"],
};
const CIVIDIS_METRICS = new Set(["kv_used_ratio", "prefix_hit_ratio", "generation_tokens_per_second", "routing_weight"]);
const DARK_INK = "#000000";
const LIGHT_INK = "#ffffff";
const LEVELS = 255;
export const GAP_FROM_PIXELS = 6;

export function scaleOf(metric) {
  return CIVIDIS_METRICS.has(metric.key) ? "cividis" : "viridis";
}

// Which of 256 colours a value gets: two values of one level look alike.
export function levelOf(value, metric) {
  const share = (value - metric.low) / (metric.high - metric.low);
  return Math.round(Math.min(1, Math.max(0, share)) * LEVELS);
}

const inks = new Map();

// Black or white, whichever is read better on the colour of a level: on either side of this luminance
// the contrast is at least 4.5 to 1.
const EVEN_LUMINANCE = 0.179;

export function inkOn(scale, level) {
  const key = `${scale}/${level}`;
  if (!inks.has(key)) inks.set(key, luminance(colourOf(scale, level)) > EVEN_LUMINANCE ? DARK_INK : LIGHT_INK);
  return inks.get(key);
}

// Red, green and blue of a level.
export function colourOf(scale, level) {
  const stops = SCALES[scale];
  const share = level / LEVELS;
  const at = share * (stops.length - 1);
  const from = Math.min(stops.length - 2, Math.floor(at));
  const channels = (stop) => [0, 2, 4].map((start) => parseInt(stop.slice(start, start + 2), 16));
  const [low, high] = [channels(stops[from]), channels(stops[from + 1])];
  return low.map((value, index) => value + (high[index] - value) * (at - from));
}

// Relative luminance, as WCAG defines it.
export function luminance(channels) {
  const [red, green, blue] = channels.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// The part of a cell that is coloured: cells that are large enough have a gap between them.
export function inner({ left, top, width, height }) {
  const gap = Math.min(width, height) >= GAP_FROM_PIXELS ? 0.5 : 0;
  return { left: left + gap, top: top + gap, width: width - 2 * gap, height: height - 2 * gap };
}

export function fillBox(context, style, { left, top, width, height }) {
  context.fillStyle = style;
  context.fillRect(left, top, width, height);
}

export function strokeBox(context, colour, { left, top, width, height }, line = 1) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.strokeRect(left + line / 2, top + line / 2, width - line, height - line);
}

export function crossBox(context, colour, { left, top, width, height }) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(left, top);
  context.lineTo(left + width, top + height);
  context.moveTo(left + width, top);
  context.lineTo(left, top + height);
  context.stroke();
}

// Text in the middle of a cell, on a plate of its own where what is below would make it hard to read.
export function writeIn(context, text, { left, top, width, height }, { ink, plate }) {
  context.textAlign = "center";
  context.textBaseline = "middle";
  const wide = context.measureText(text).width;
  if (wide > width - 6) return;
  if (plate) fillBox(context, plate, { left: left + (width - wide) / 2 - 4, top: top + height / 2 - 9, width: wide + 8, height: 18 });
  context.fillStyle = ink;
  context.fillText(text, left + width / 2, top + height / 2 + 1);
}

export function hatchPattern(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = 5;
  tile.height = 5;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-5, 0, 5]) {
    pen.moveTo(shift - 1, 6);
    pen.lineTo(shift + 6, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

// The same for names that differ at their end.
export function fitTail(context, text, room) {
  let cut = text;
  while (cut.length > 1 && context.measureText(cut).width > room) cut = cut.slice(1);
  return cut;
}

export function fit(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let cut = text;
  while (cut.length > 1 && context.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
  return `${cut}…`;
}
