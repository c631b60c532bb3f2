// Words and units, the same as dashboard/wording.py writes on the server.
const THIN = "\u202f";
export const MISSING = "–";

function grouped(value, digits) {
  const [whole, part] = Math.abs(value).toFixed(digits).split(".");
  const sign = value < 0 ? "−" : "";
  return sign + whole.replace(/\B(?=(\d{3})+$)/g, THIN) + (part ? `.${part}` : "");
}

export function number(value) {
  if (value === null || value === undefined) return MISSING;
  if (Number.isNaN(value)) return "NaN";
  const size = Math.abs(value);
  return grouped(value, size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
}

export function count(value) {
  return value === null || value === undefined ? MISSING : grouped(value, 0);
}

export function short(value) {
  if (value === null || value === undefined) return MISSING;
  for (const [limit, unit, letter] of [[1e12, 1e12, "T"], [1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (value >= limit) return number(value / unit) + THIN + letter;
  }
  return count(value);
}

export function percent(ratio) {
  if (ratio === null || ratio === undefined) return MISSING;
  if (Number.isNaN(ratio)) return "NaN";
  const scaled = ratio * 100;
  const size = Math.abs(scaled);
  if (size > 0 && size < 0.01) return `<${THIN}0.01${THIN}%`; // little is not nothing
  return scaled.toFixed(size === 0 || size >= 10 ? 0 : size >= 0.1 ? 1 : 2) + THIN + "%";
}

export function seconds(value) {
  if (value === null || value === undefined) return MISSING;
  if (Number.isNaN(value)) return "NaN";
  if (value < 1) return `${Math.round(value * 1000)}${THIN}ms`;
  if (value < 10) return `${value.toFixed(1)}${THIN}s`;
  return coarse(Math.round(value));
}

function coarse(whole) {
  for (const [size, unit, smallerSize, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= size) {
      const rest = Math.floor((whole % size) / smallerSize);
      return `${Math.floor(whole / size)}${THIN}${unit}` + (rest ? ` ${rest}${THIN}${smaller}` : "");
    }
  }
  return `${whole}${THIN}s`;
}

export function ago(ageSeconds) {
  return ageSeconds < 1 ? "just now" : `${coarse(Math.round(ageSeconds))} ago`;
}

export function ofUnit(value, unit) {
  if (unit === "ratio") return percent(value);
  if (unit === "seconds") return seconds(value);
  return number(value);
}

export const formats = { number, count, short, percent, seconds };
