// Text for people: names made safe to look at, numbers made short, a name as Python would write it, and globs.

// What Python's str.isprintable refuses, and letters that take no room: the same that the command line writes out.
const HIDDEN = /(?! )[\p{C}\p{Z}]|[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]|[\u{e0100}-\u{e01ef}]/gu;
const PILED = /\p{M}{5,}/gu;
const PLAIN = /^[\x20-\x7e]*$/;
const LONGEST = 200; // characters of a name in a list; a hostile one may have millions

function writtenOut(char) {
  const known = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
  const code = char.codePointAt(0);
  const digits = (count) => code.toString(16).padStart(count, "0");
  return known[char] || (code < 0x100 ? `\\x${digits(2)}` : code < 0x10000 ? `\\u${digits(4)}` : `\\U${digits(8)}`);
}

// The text with everything written out that a browser would act on, reorder or hide, and marks that would pile up over other lines.
function shown(text) {
  if (PLAIN.test(text)) return text;
  return text.replace(HIDDEN, writtenOut).replace(PILED, (marks) => Array.from(marks, writtenOut).join(""));
}

function cut(text, limit) {
  const tail = Math.floor(limit / 3);
  return text.length <= limit ? text : `${text.slice(0, limit - tail - 1)}…${text.slice(-tail)}`;
}

// The same, cut in the middle where it is long. Cut first, since what is cut away need not be looked at, and after: written out
// it is longer.
function clipped(text, limit = LONGEST) {
  return cut(shown(cut(text, limit)), limit);
}

// The text as a literal of Python.
function pythonText(text) {
  const quoted = text.replace(/["\\]/g, "\\$&");
  return `"${PLAIN.test(text) ? quoted : quoted.replace(HIDDEN, writtenOut)}"`;
}

function nbytesText(number) {
  if (number < 1024) return `${number} B`;
  let size = number;
  for (const unit of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    size /= 1024;
    if (size < 1023.95) return `${size.toFixed(1)} ${unit}`;
  }
  return `${(size / 1024).toFixed(1)} EiB`;
}

const grouped = new Intl.NumberFormat("en-US");

function countText(number) {
  if (number < 100_000) return grouped.format(number);
  if (number < 999_500) return `${(number / 1e3).toFixed(0)}K`;
  if (number < 999_950_000) return `${(number / 1e6).toFixed(1)}M`;
  if (number < 999_995_000_000) return `${(number / 1e9).toFixed(2)}B`;
  return `${(number / 1e12).toFixed(2)}T`;
}

function plural(number, noun) {
  return `${grouped.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Whole numbers in order as ranges: "0–3, 7".
function rangesText(sorted) {
  const ranges = [];
  for (const number of sorted) {
    const last = ranges[ranges.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([from, to]) => (from === to ? String(from) : `${from}–${to}`)).join(", ");
}

// A measured number in three digits.
function numberText(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return grouped.format(value);
  if (size < 1e-3 || size >= 1e5) return value.toExponential(2).replace("e+", "e");
  if (size >= 999.5) return grouped.format(Math.round(value));
  // A cosine of 0.9996 is not 1.
  return size < 1 && size >= 0.9995 ? String(Number(value.toPrecision(6))) : value.toPrecision(3);
}

// A share that never rounds to none or to all when it is neither.
function shareText(share) {
  if (share === 0 || share === 1) return `${share * 100}%`;
  const percent = share * 100;
  if (percent < 0.01) return "<0.01%";
  if (percent > 99.99) return ">99.99%";
  return `${Number(percent.toPrecision(3))}%`;
}

// A power of two as it is written by hand.
function power(exponent) {
  return `2${String(exponent).replace(/./g, (digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]))}`;
}

function shapeText(sizes) {
  return `[${sizes.join(", ")}]`;
}

const STAR = null;

// A set of a glob, [a-z] or [!0-9], from after its bracket: what it takes, and where it ends; null where it never ends.
function globSet(chars, from) {
  const not = chars[from] === "!";
  let at = not ? from + 1 : from;
  const first = at;
  const ranges = [];
  while (at < chars.length && (chars[at] !== "]" || at === first)) {
    const through = chars[at + 1] === "-" && at + 2 < chars.length && chars[at + 2] !== "]" ? chars[at + 2] : null;
    ranges.push([chars[at], through ?? chars[at]]);
    at += through === null ? 1 : 3;
  }
  if (at >= chars.length) return null;
  return { takes: (char) => ranges.some(([low, high]) => low <= char && char <= high) !== not, stop: at + 1 };
}

const MOST_GLOBS = 2000; // that the braces of one may stand for

// The globs without braces that a glob stands for, as on the command line: {a,b} and {0..19}. Braces that are not closed, or are
// around one thing, are characters; so are those of a glob that would stand for too many.
function globsOf(pattern) {
  const numbers = /^\{([0-9]{1,15})\.\.([0-9]{1,15})\}/;
  const step = (at) => {
    const set = pattern[at] === "[" && /^\[!?\]?[^\]]*\]/.exec(pattern.slice(at));
    return set ? set[0].length : 1;
  };
  const pairs = new Map(); // from a brace to what is in it: where it and its commas are
  const open = [];
  for (let at = 0; at < pattern.length; at += step(at)) {
    if (pattern[at] === "{") open.push([at]);
    else if (pattern[at] === "," && open.length) open[open.length - 1].push(at);
    else if (pattern[at] === "}" && open.length) {
      const own = [...open.pop(), at];
      if (own.length > 2) pairs.set(own[0], own);
    }
  }
  let many = 1;
  const read = (from, to) => {
    let made = [""];
    for (let at = from; at < to; ) {
      const range = numbers.exec(pattern.slice(at, to));
      const places = pairs.get(at);
      let next = [pattern.slice(at, at + step(at))];
      let stop = at + step(at);
      if (range) {
        const [low, high] = [range[1], range[2]].sort((a, b) => a - b);
        const width = [low, high].some((text) => /^0./.test(text)) ? Math.max(low.length, high.length) : 0;
        many *= high - low + 1;
        if (many > MOST_GLOBS) return null;
        next = Array.from({ length: high - low + 1 }, (_, n) => String(Number(low) + n).padStart(width, "0"));
        stop = at + range[0].length;
      } else if (places) {
        const parts = places.slice(1).map((place, n) => read(places[n] + 1, place));
        if (parts.includes(null)) return null;
        next = parts.flat();
        many *= next.length;
        if (many > MOST_GLOBS) return null;
        stop = places[places.length - 1] + 1;
      }
      made = made.flatMap((one) => next.map((other) => one + other));
      at = stop;
    }
    return made;
  };
  return read(0, pattern.length) ?? [pattern];
}

// A glob as on the command line, with *, ?, […], {a,b} and {0..19}: a test of names. A name in full always means itself.
function globTest(pattern) {
  const tests = globsOf(pattern).map(globWithoutBraces);
  return (name) => name === pattern || tests.some((test) => test(name));
}

function globWithoutBraces(pattern) {
  const chars = Array.from(pattern);
  const steps = [];
  for (let at = 0; at < chars.length;) {
    const char = chars[at++];
    const set = char === "[" ? globSet(chars, at) : null;
    if (char === "*") steps.push(STAR);
    else if (char === "?") steps.push(() => true);
    else if (set) {
      steps.push(set.takes);
      at = set.stop;
    } else steps.push((other) => other === char);
  }
  return (name) => globMatches(steps, PLAIN.test(name) ? name : Array.from(name));
}

// Whether steps match a text, in time that no pattern can make worse than text times pattern: only the last star is tried again.
function globMatches(steps, text) {
  let at = 0;
  let inText = 0;
  let star = -1;
  let restart = 0;
  while (inText < text.length) {
    if (at < steps.length && steps[at] === STAR) {
      star = at++;
      restart = inText;
    } else if (at < steps.length && steps[at](text[inText])) {
      at++;
      inText++;
    } else if (star >= 0) {
      at = star + 1;
      inText = ++restart;
    } else {
      return false;
    }
  }
  while (at < steps.length && steps[at] === STAR) at++;
  return at === steps.length;
}

// A test of names out of what was typed: words apart by spaces, any of them; "!" before one leaves out; a word
// without a wildcard is looked for anywhere. Where words are told apart by case, so they are here.
function nameFilter(typed) {
  const words = typed.split(/\s+/).filter((word) => word && word !== "!");
  const asTest = (word) => (/[*?[{]/.test(word) ? globTest(word) : (name) => name.includes(word));
  const wanted = words.filter((word) => word[0] !== "!").map(asTest);
  const unwanted = words.filter((word) => word[0] === "!").map((word) => asTest(word.slice(1)));
  if (!words.length) return null;
  return (name) => (!wanted.length || wanted.some((test) => test(name))) && !unwanted.some((test) => test(name));
}
