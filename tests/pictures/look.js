// What sticks out of its box, or covers other words, in a window of so many pixels.
(width => {
  const found = [], slack = 1;
  const say = (element, words) => found.push(
    `<${element.tagName} ${element.getAttribute("class") || ""}> `
    + `${(element.textContent || "").slice(0, 40)}: ${words}`);
  const outside = (box, frame) => box.left < frame.left - slack || box.right > frame.right + slack
    || box.top < frame.top - slack || box.bottom > frame.bottom + slack;
  const whole = document.documentElement, body = document.body;
  if (body) {
    if (whole.scrollWidth > width) say(whole, `is ${whole.scrollWidth} pixels wide`);
    for (const element of body.querySelectorAll("*")) {
      const box = element.getBoundingClientRect();
      if (!box.width || !box.height || element.closest("svg")) continue;
      const view = element.parentElement.closest(".map");
      const left = view ? view.getBoundingClientRect().left - view.scrollLeft : 0;
      const right = view ? left + view.scrollWidth + 2 : width;
      if (box.left < left - slack || box.right > right + slack) say(element, "sticks out");
    }
  }
  for (const drawing of document.querySelectorAll("svg")) {
    const frame = drawing.getBoundingClientRect();
    const own = element => element.closest("svg") === drawing && !element.closest("defs");
    for (const element of drawing.querySelectorAll("text, rect, circle, line"))
      if (own(element) && outside(element.getBoundingClientRect(), frame))
        say(element, "is outside its drawing");
    if (drawing.parentElement && drawing.parentElement.closest("svg")) continue;
    const texts = [...drawing.querySelectorAll("text")]
      .map(element => [element, element.getBoundingClientRect()])
      .filter(([, box]) => box.width)
      .sort(([, a], [, b]) => a.top - b.top);
    texts.forEach(([element, box], at) => {
      for (const [other, next] of texts.slice(at + 1)) {
        if (next.top > box.bottom) break;
        const over = Math.min(box.right, next.right) - Math.max(box.left, next.left);
        const high = Math.min(box.bottom, next.bottom) - next.top;
        if (over > slack && high > 4) say(element, `covers ${other.textContent.slice(0, 40)}`);
      }
    });
  }
  return found;
})
