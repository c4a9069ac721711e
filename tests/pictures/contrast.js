// The contrast of each colour of words with what they are on.
(() => {
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper");
  const canvas = document.createElementNS("http://www.w3.org/1999/xhtml", "canvas");
  const context = canvas.getContext("2d");
  const light = colour => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05)
    / (Math.min(light(a), light(b)) + 0.05);
  const written = [...document.querySelectorAll("text, h1, p, td, th, pre, li, button")];
  return Object.fromEntries(written.map(element => {
    const style = getComputedStyle(element), drawn = element.tagName === "text";
    const inside = element.classList.contains("inside");
    const ink = drawn ? style.fill : style.color;
    return [`${ink} on ${inside ? style.stroke : paper}`,
      contrast(ink, inside ? style.stroke : paper)];
  }));
})()
