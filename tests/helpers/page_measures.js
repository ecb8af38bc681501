"use strict";

// What a reader sees of a page: its texts' boxes, and which of them cover each other or stick out.
globalThis.Measures = (() => {
  const CONTROLS = "input:not([type=hidden]), select, textarea, button, progress, meter";

  function isSeen(element) {
    return element.checkVisibility({ opacityProperty: true, visibilityProperty: true,
                                     contentVisibilityAuto: true });
  }

  /** The part of a box that its scrolling and clipping ancestors show; null if nothing. */
  function shownPart(box, element) {
    let { left, top, right, bottom } = box;
    for (let parent = element; parent && parent !== document.body; parent = parent.parentElement) {
      const style = getComputedStyle(parent);
      const clips = style.overflowX !== "visible" || style.clipPath !== "none"
        || (style.position === "absolute" && style.clip !== "auto");
      if (!clips || style.display === "inline") continue;
      const own = parent.getBoundingClientRect();
      left = Math.max(left, own.left);
      right = Math.min(right, own.right);
      top = Math.max(top, own.top);
      bottom = Math.min(bottom, own.bottom);
      if (style.clipPath !== "none" && !(parent instanceof SVGElement)) return null;
    }
    if (right - left < 2 || bottom - top < 2) return null;
    return { left: left + scrollX, top: top + scrollY, right: right + scrollX, bottom: bottom + scrollY };
  }

  function drawnSize(element) {
    const size = parseFloat(getComputedStyle(element).fontSize);
    const picture = element.closest("text");
    if (!picture) return size;
    const { a, b } = picture.getScreenCTM();
    return size * Math.hypot(a, b);
  }

  function colorOf(element) {
    const style = getComputedStyle(element);
    const text = element.closest("text") ? style.fill : style.color;
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  }

  function nameOf(element) {
    const name = element.id ? `#${element.id}` : "";
    return `${element.tagName.toLowerCase()}${name}`;
  }

  function describe(item) {
    return item.text ? `'${item.text}'` : nameOf(item.element);
  }

  /** Each line of each visible text: its box, the element, size and colour. */
  function lines() {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement;
      const text = node.textContent.trim().replace(/\s+/g, " ");
      if (!text || element.closest("script, style, noscript, option, title, desc") || !isSeen(element)) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const box of range.getClientRects()) {
        const shown = shownPart(box, element);
        if (shown) found.push({ node, element, text, ...shown });
      }
    }
    return found;
  }

  function controls() {
    const found = [];
    for (const element of document.querySelectorAll(CONTROLS)) {
      if (!isSeen(element)) continue;
      const shown = shownPart(element.getBoundingClientRect(), element.parentElement);
      if (shown) found.push({ element, text: "", ...shown });
    }
    return found;
  }

  /** Whether two boxes share more than a line's spare space above and below its letters. */
  function cover(one, other) {
    const width = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const height = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    const lower = Math.min(one.bottom - one.top, other.bottom - other.top);
    return width > 1 && height > 0.3 * lower;
  }

  function belongTogether(one, other) {
    if (one.node && one.node === other.node) return true;
    return one.element !== other.element
      ? one.element.contains(other.element) && !one.node
        || other.element.contains(one.element) && !other.node
      : !one.node || !other.node;
  }

  function overlaps() {
    const items = [...lines(), ...controls()].sort((one, other) => one.top - other.top);
    const found = [];
    items.forEach((item, index) => {
      for (const other of items.slice(index + 1)) {
        if (other.top >= item.bottom) break;
        if (cover(item, other) && !belongTogether(item, other)) {
          found.push(`${describe(item)} and ${describe(other)}`);
        }
      }
    });
    return found;
  }

  /** Whether an ancestor scrolls what is wider than it. */
  function scrolls(element) {
    for (let parent = element.parentElement; parent && parent !== document.body; parent = parent.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(parent).overflowX)) return true;
    }
    return false;
  }

  function stickingOut() {
    const found = [];
    const width = document.documentElement.clientWidth;
    for (const element of document.querySelectorAll("body *")) {
      const box = element.getBoundingClientRect();
      if (element.closest("svg") !== null && element.tagName !== "svg") continue;
      if (!isSeen(element) || scrolls(element) || box.width < 2) continue;
      if (box.right > width + 0.5 || box.left < -0.5) found.push(nameOf(element));
    }
    for (const text of document.querySelectorAll("svg text")) {
      if (!isSeen(text)) continue;
      const own = text.getBoundingClientRect();
      const picture = text.closest("svg").getBoundingClientRect();
      const isOut = own.left < picture.left - 1 || own.right > picture.right + 1
        || own.top < picture.top - 1 || own.bottom > picture.bottom + 1;
      if (own.width && isOut) found.push(describe({ text: text.textContent }));
    }
    return found;
  }

  function texts() {
    return lines().map(({ element, text, left, top, right, bottom }) => ({
      text, left, top, right, bottom, size: drawnSize(element), color: colorOf(element),
      bold: Number(getComputedStyle(element).fontWeight) >= 700,
    }));
  }

  return { texts, overlaps, stickingOut };
})();
