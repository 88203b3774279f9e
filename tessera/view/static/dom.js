// Elements and numbers. Text is always a text node, never HTML.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

export function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

export function formatPace(rate) {
  const digits = { maximumSignificantDigits: 2 };
  if (rate >= 1) return `${rate.toLocaleString("en-US", digits)} steps/s`;
  return `${(1 / rate).toLocaleString("en-US", digits)} s/step`;
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function formatAge(time) {
  const seconds = Date.now() / 1000 - time;
  return seconds < 5 ? "now" : `${formatSeconds(seconds)} ago`;
}

export function formatValue(value) {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return value.map(formatValue).join(", ") || "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function badge(state) {
  return h("span", { class: `badge ${state}` }, state);
}

export function empty(title, text) {
  return h("div", { class: "empty" }, h("strong", {}, title), text ? h("p", {}, text) : null);
}

export function errorBox(error) {
  return h("div", { class: "error", role: "alert" }, error.message ?? String(error));
}

export function copyButton(label, text) {
  const button = h("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", async () => {
    const value = typeof text === "function" ? text() : text;
    try {
      await navigator.clipboard.writeText(value);
    } catch {
      const area = h("textarea", { class: "offscreen" });
      area.value = value;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.dataset.copied = value;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

export function spark(values, width = 96, height = 24) {
  const finite = values.filter((value) => Number.isFinite(value));
  if (finite.length < 2) return h("span", { class: "muted" }, "–");
  const low = Math.min(...finite);
  const range = Math.max(...finite) - low || 1;
  const points = finite.map((value, i) => {
    const x = 1 + (i * (width - 2)) / (finite.length - 1);
    const y = height - 2 - ((value - low) / range) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  const line = svg("polyline", { points: points.join(" ") });
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, line);
}

export function runLink(id, tab = "") {
  return `#/run/${encodeURIComponent(id)}${tab ? `/${tab}` : ""}`;
}

export function onRemoved(element, callback) {
  // Calls back when an element that was shown leaves the page.
  let shown = false;
  const observer = new MutationObserver(() => {
    if (element.isConnected) shown = true;
    else if (shown) {
      observer.disconnect();
      callback();
    }
  });
  observer.observe(document.body, { childList: true, subtree: true });
}
