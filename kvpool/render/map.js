// Says what a byte of an item is: one that is typed in, or a box of a map that is clicked or tapped.
// `maps` has each item's bytes, the name of unclaimed bytes, and its regions.
const number = n => n.toLocaleString("en");
// the step of each axis, largest stride first, then the byte inside the cell; null between cells
function steps(at, axes, width) {
  if (!axes.length) return at >= 0 && at < width ? [at] : null;
  const [axis, ...finer] = axes;
  const reach = finer.reduce((sum, a) => sum + (a.size - 1) * a.stride, width);
  const single = axis.size === 1;
  const last = single ? 0 : Math.min(axis.size - 1, Math.floor(at / axis.stride));
  const first = single ? 0 : Math.max(0, Math.ceil((at - reach + 1) / axis.stride));
  for (let step = last; step >= first; step--) {
    const rest = steps(at - step * axis.stride, finer, width);
    if (rest) return [step, ...rest];
  }
  return null;
}
function what(map, byte) {
  if (!Number.isInteger(byte) || byte < 0 || byte >= map.bytes)
    return "an item has bytes 0 to " + number(map.bytes - 1);
  for (const region of map.regions) {
    const numbers = steps(byte - region.offset, region.axes, region.width);
    if (!numbers) continue;
    const inside = numbers.pop();
    const names = region.axes.map((axis, i) => axis.name + " " + (axis.start + numbers[i]));
    const element = Math.floor(inside / region.element);
    return [region.name, ...names].join(", ") + ": byte " + number(inside) + " of "
      + number(region.width) + ", " + region.dtype + " number " + number(element);
  }
  return map.unclaimed;
}
maps.forEach((map, index) => {
  const section = document.getElementById("map-" + index);
  const asked = section.querySelector("input"), told = section.querySelector("output");
  const cells = [...section.querySelectorAll("rect[data-from]")];
  function show() {
    const byte = asked.value === "" ? -1 : Number(asked.value);
    told.textContent = what(map, byte);
    for (const { classList, dataset } of cells)
      classList.toggle("found", Number(dataset.from) <= byte && byte < Number(dataset.to));
  }
  asked.addEventListener("input", show);
  section.querySelector("form").addEventListener("submit", event => event.preventDefault());
  section.querySelector("svg").addEventListener("click", event => {
    const cell = event.target.closest("rect[data-from]");
    if (!cell) return;
    const [from, to] = [Number(cell.dataset.from), Number(cell.dataset.to)];
    const box = cell.getBoundingClientRect(), part = (event.clientX - box.left) / box.width;
    asked.value = from + Math.min(to - from - 1, Math.max(0, Math.floor(part * (to - from))));
    show();
  });
});
