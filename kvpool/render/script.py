"""The script of a page of maps: what a byte is, where a cell is, and maps that are panned, zoomed
and walked through by mouse, finger or keys.
"""

SCRIPT = """
const ZOOM = 1.5, MOST = 8, NUDGE = 4;
const number = n => n.toLocaleString("en");
function steps(at, axes, width) {
  if (!axes.length) return at >= 0 && at < width ? [at] : null;
  const [axis, ...finer] = axes;
  const reach = finer.reduce((sum, a) => sum + (a.size - 1) * a.stride, width);
  const one = axis.size === 1;
  const last = one ? 0 : Math.min(axis.size - 1, Math.floor(at / axis.stride));
  const first = one ? 0 : Math.max(0, Math.ceil((at - reach + 1) / axis.stride));
  for (let step = last; step >= first; step--) {
    const found = steps(at - step * axis.stride, finer, width);
    if (found) return [step, ...found];
  }
  return null;
}
function what(map, byte) {
  for (const region of map.regions) {
    const found = steps(byte - region.offset, region.axes, region.width);
    if (!found) continue;
    const inside = found.pop();
    const named = region.axes.map((axis, i) => axis.name + " " + (axis.start + found[i]));
    const element = Math.floor(inside / region.element);
    return [region.name, ...named].join(", ") + ": byte " + number(inside) + " of "
      + number(region.width) + ", " + region.dtype + " number " + number(element);
  }
  return map.unclaimed;
}
function middle(cell) {
  const box = cell.getBBox();
  return [box.x + box.width / 2, box.y];
}
function beside(cells, cell, key) {
  const at = cells.indexOf(cell), last = cells.length - 1;
  const along = { Home: 0, End: last, ArrowLeft: Math.max(0, at - 1),
    ArrowRight: Math.min(last, at + 1) };
  if (key in along) return cells[along[key]];
  const [x, y] = middle(cell), way = key === "ArrowUp" ? -1 : 1;
  const rows = cells.map(other => way * (middle(other)[1] - y)).filter(row => row > 0);
  if (!rows.length) return cell;
  const row = y + way * Math.min(...rows), far = other => Math.abs(middle(other)[0] - x);
  return cells.filter(other => middle(other)[1] === row)
    .reduce((best, other) => far(other) < far(best) ? other : best);
}
maps.forEach((map, index) => {
  const section = document.getElementById("map-" + index);
  const view = section.querySelector(".map"), drawing = view.querySelector("svg");
  const [asked, told] = section.querySelectorAll("input.byte, output.what");
  const cells = [...section.querySelectorAll("rect[data-from]")];
  const bytes = cell => [Number(cell.dataset.from), Number(cell.dataset.to)];
  let found = null;
  function mark(byte) {
    const inside = cell => bytes(cell)[0] <= byte && byte < bytes(cell)[1];
    found = cells.find(inside) || null;
    for (const cell of cells) cell.classList.toggle("found", cell === found);
  }
  function show(byte) {
    const inside = Number.isInteger(byte) && byte >= 0 && byte < map.bytes;
    mark(inside ? byte : -1);
    const cell = found ? "\\n" + found.querySelector("title").textContent : "";
    told.textContent = inside
      ? what(map, byte) + cell : "an item has bytes 0 to " + number(map.bytes - 1);
  }
  function go(byte) {
    asked.value = byte;
    show(byte);
  }
  asked.addEventListener("input", () => show(asked.value === "" ? -1 : Number(asked.value)));

  const [width, height] = [drawing.getAttribute("width"), drawing.getAttribute("height")];
  let scale = 1, held = null, dragged = false;
  function zoom(to) {
    const least = Math.min(1, view.clientWidth / width), before = scale;
    scale = Math.min(MOST, Math.max(least, to));
    const [x, y] = [view.scrollLeft + view.clientWidth / 2, view.scrollTop + view.clientHeight / 2];
    drawing.setAttribute("width", width * scale);
    drawing.setAttribute("height", height * scale);
    view.scrollLeft = x * scale / before - view.clientWidth / 2;
    view.scrollTop = y * scale / before - view.clientHeight / 2;
  }
  const larger = () => zoom(scale * ZOOM);
  const zooms = { "-": () => zoom(scale / ZOOM), "0": () => zoom(1), "+": larger, "=": larger };
  for (const button of section.querySelectorAll("button[data-zoom]"))
    button.addEventListener("click", zooms[button.dataset.zoom]);
  view.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (zooms[event.key]) zooms[event.key]();
    else if (/^(Arrow|Home|End)/.test(event.key)) {
      const to = found ? beside(cells, found, event.key) : cells[0];
      go(bytes(to)[0]);
      to.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else return;
    event.preventDefault();
  });
  view.addEventListener("pointerdown", event => {
    dragged = false;
    if (event.pointerType === "mouse" && event.button === 0)
      held = [event.clientX + view.scrollLeft, event.clientY + view.scrollTop];
  });
  view.addEventListener("pointermove", event => {
    if (!held) return;
    const [x, y] = [held[0] - event.clientX, held[1] - event.clientY];
    if (!dragged && Math.hypot(x - view.scrollLeft, y - view.scrollTop) < NUDGE) return;
    if (!dragged) view.setPointerCapture(event.pointerId);
    dragged = true;
    view.scrollTo(x, y);
  });
  for (const name of ["pointerup", "pointercancel"])
    view.addEventListener(name, () => { held = null; });
  view.addEventListener("click", event => {
    const cell = event.target.closest("rect[data-from]");
    if (!cell || dragged) return;
    const [from, to] = bytes(cell), box = cell.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    go(from + Math.min(to - from - 1, Math.max(0, Math.floor(part * (to - from)))));
  });

  for (const form of section.querySelectorAll("form.where")) {
    const region = map.regions[form.dataset.region], inputs = [...form.querySelectorAll("input")];
    const place = form.querySelector("output");
    form.addEventListener("input", () => {
      const steps = region.axes.map((axis, i) => Number(inputs[i].value || NaN) - axis.start);
      const there = steps.every((step, i) =>
        Number.isInteger(step) && step >= 0 && step < region.axes[i].size);
      const add = (sum, axis, i) => sum + steps[i] * axis.stride;
      const byte = region.axes.reduce(add, region.offset);
      place.textContent = there
        ? "bytes " + number(byte) + " to " + number(byte + region.width - 1) : "no such cell here";
      mark(there ? byte : -1);
    });
  }
  for (const form of section.querySelectorAll("form"))
    form.addEventListener("submit", event => event.preventDefault());
});
"""
