// Elements, text and numbers of the live page. Text is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);
export const NONE = "–";

export function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function draw(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

// Redraws an element only when its value has changed, so that a selection or a screen reader is not disturbed.
const drawn = new Map();
export function redraw(id, value, build) {
  const json = JSON.stringify(value);
  if (drawn.get(id) === json) return;
  drawn.set(id, json);
  $(id).replaceChildren(...build());
}

// Makes `nodes` the children of `parent` and moves as few of them as possible; the focus stays where it is.
export function arrange(parent, nodes) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] || null);
  });
  if (focused && focused.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

// Settings that survive a reload of the page live in its address, behind the #: nothing is stored.
const settings = new URLSearchParams(location.hash.slice(1));
export const setting = (name) => settings.get(name) || "";
export function setSetting(name, value) {
  if (value) settings.set(name, value);
  else settings.delete(name);
  history.replaceState(null, "", `#${settings}`);
}

const known = (value) => value !== null && value !== undefined;

export function percent(share) {
  return known(share) ? `${(share * 100).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1)} %` : NONE;
}

export function whole(number) {
  if (!known(number)) return NONE;
  return number >= 10000 ? `${(number / 1000).toFixed(number >= 100000 ? 0 : 1)}k` : `${Math.round(number)}`;
}

export const rate = (number) => (number >= 100 ? whole(number) : number.toFixed(1));

export function count(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function volume(bytes) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(bytes, 1) * 1.0005) / 3)));
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB"][power]}`;
}

export function time(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
}

export function span(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString(undefined, { hourCycle: "h23" });
export const words = (name) => name.replaceAll("_", " ");

export function gauge() {
  const fill = make("i");
  const node = make("span", { class: "gauge" }, fill);
  const set = (share, how = "") => {
    fill.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
    node.className = `gauge ${how}`;
  };
  return { node, set };
}
