// Making elements. Names come out of files that nobody vouches for, so text goes in by textContent and in no other way:
// there is no innerHTML, no handler in an attribute and no address made of data anywhere on this page.

function byId(id) {
  return document.getElementById(id);
}

// An element with a class, properties and children; a child that is a string becomes text.
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function button(text, className, whenPressed) {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", whenPressed);
  return element;
}

// An element of a drawing. Colours come from classes, so that the themes and the printer choose them.
function shape(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function empty(element) {
  element.replaceChildren();
  return element;
}

// What a screen reader says next.
function announce(text) {
  byId("announce").textContent = text;
}

// A canvas that is as sharp as the screen. The drawing goes in CSS pixels.
function sizeCanvas(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const across = Math.max(1, Math.round(width * ratio));
  const down = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// The small box beside the pointer: a title and some lines. It never takes the pointer, and stays on the screen.
function showTip(x, y, title, lines) {
  const tip = empty(byId("tip"));
  tip.append(make("strong", "", title), ...lines.map((line) => make("span", "", line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > window.innerWidth ? Math.max(4, x - width - 10) : x + 14;
  const top = y + 16 + height > window.innerHeight ? Math.max(4, y - height - 10) : y + 16;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

function hideTip() {
  byId("tip").hidden = true;
}

// The rectangle over a picture that says where the pointer or the keyboard is: the picture itself is not drawn again.
function placeMark(mark, box) {
  mark.hidden = !box;
  if (!box) return;
  mark.style.transform = `translate(${box.x}px, ${box.y}px)`;
  mark.style.width = `${Math.max(box.w, 3)}px`;
  mark.style.height = `${Math.max(box.h, 3)}px`;
}

// Copies text, and says so on the button. Where the clipboard is refused, the old way by a selection.
async function copy(text, pressed) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", "away");
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  const before = "Copy";
  pressed.textContent = done ? "Copied" : "Select it and press Ctrl-C";
  announce(pressed.textContent);
  setTimeout(() => (pressed.textContent = before), 1600);
}
