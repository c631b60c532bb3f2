// Reads value frames; the layout of the bytes is described in telemetry/domain/frames.py.
export const MISSING = 0xffff;
export const STALE = 0xfffe;
export const NOT_A_NUMBER = 0xfffd;
export const EMPTY_SLOT = 255;
const HEADER_BYTES = 24;
const FORMAT_VERSION = 1;

export function decodeFrame(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < HEADER_BYTES || view.getUint8(0) !== 0x58 || view.getUint8(1) !== 0x46) {
    throw new Error("not a frame");
  }
  if (view.getUint8(2) !== FORMAT_VERSION) throw new Error("a frame of another format: load the page again");
  const metrics = view.getUint8(3);
  const cells = view.getUint32(20, true);
  const start = HEADER_BYTES + cells + (cells % 2);
  if (buffer.byteLength < start + metrics * cells * 2) throw new Error("a frame that was cut");
  const codes = [];
  for (let metric = 0; metric < metrics; metric += 1) {
    codes.push(readCodes(buffer, view, start + metric * cells * 2, cells));
  }
  return {
    layoutVersion: view.getUint32(4, true),
    sequence: view.getUint32(8, true),
    builtAt: view.getFloat64(12, true),
    statuses: new Uint8Array(buffer, HEADER_BYTES, cells),
    codes,
  };
}

const littleEndian = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

function readCodes(buffer, view, at, cells) {
  if (littleEndian) return new Uint16Array(buffer, at, cells);
  return Uint16Array.from({ length: cells }, (_, cell) => view.getUint16(at + cell * 2, true));
}

// The value of a code; null for missing and stale, NaN for NaN. Never a zero for either.
export function valueOf(code, scale) {
  if (code === MISSING || code === STALE) return null;
  return code === NOT_A_NUMBER ? NaN : code * scale;
}
