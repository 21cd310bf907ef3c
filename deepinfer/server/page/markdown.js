// A small part of Markdown as DOM nodes. Every character of the text ends up in a text node: nothing the model writes
// is ever parsed as HTML, no attribute but a checked href is made from it, and nothing is loaded.

const DEPTH = 6; // of lists, quotes and emphasis inside each other; deeper ones stay text
const LONGEST_INLINE = 5000; // characters of a paragraph whose marks are looked for: the search is quadratic at worst

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

function element(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children); // strings become text nodes
  return node;
}

/** Nodes of a whole text. */
export function markdown(text) {
  return blocks(text.split("\n"), 0).map((block) => block.node);
}

/** Renders a text that grows. Blocks that nothing can change any more are made once, the others anew each time. */
export class GrowingMarkdown {
  constructor(parent) {
    this.parent = parent;
    this.settled = 0; // characters of the text whose blocks stay
    this.open = []; // nodes of the others
  }

  /** text: all of it so far; it must begin with what was given before. */
  update(text) {
    const lines = text.slice(this.settled).split("\n");
    const found = blocks(lines, 0);
    for (const node of this.open) node.remove();
    this.parent.append(...found.map((block) => block.node));
    // The last block grows, and while the last line is unfinished it may yet turn out to belong to the one before.
    let first = found.length - 1;
    if (first > 0 && found[first].start === lines.length - 1) first--;
    this.open = found.slice(Math.max(first, 0)).map((block) => block.node);
    for (let line = 0; first > 0 && line < found[first].start; line++) this.settled += lines[line].length + 1;
  }
}

/** [{node, start}]: start is the number of the block's first line. */
function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [node, end] = block(lines, at, depth);
    found.push({ node, start: at });
    at = end;
  }
  return found;
}

function block(lines, at, depth) {
  const line = lines[at];
  let match;
  if ((match = FENCE.exec(line))) return fence(lines, at, match);
  if ((match = HEADING.exec(line))) return [element(`h${Math.min(match[1].length + 2, 6)}`, "", ...inline(match[2], 0)), at + 1];
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (depth < DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEPTH && (match = ITEM.exec(line)) && match[1].length < 4) return list(lines, at, depth, match);
  if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1])) {
    const made = table(lines, at);
    if (made) return made;
  }
  return paragraph(lines, at, depth);
}

function fence(lines, at, [, mark, language]) {
  const closing = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end++;
  return [codeBlock(lines.slice(at + 1, end).join("\n"), language.trim().slice(0, 30)), Math.min(end + 1, lines.length)];
}

/** Code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const copy = element("button", "link", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1200);
  });
  return element(
    "div",
    "codeblock",
    element("div", "codehead", element("span", "", language), copy),
    element("pre", "", element("code", "", text)),
  );
}

function quote(lines, at, depth) {
  let end = at;
  const inside = [];
  while (end < lines.length && QUOTE.test(lines[end])) inside.push(lines[end++].replace(QUOTE, ""));
  return [element("blockquote", "", ...blocks(inside, depth + 1).map((one) => one.node)), end];
}

function list(lines, at, depth, [, indent, mark]) {
  const ordered = /\d/.test(mark);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(mark, 10);
  const isItem = (line) => {
    const match = ITEM.exec(line);
    return match && match[1].length <= indent.length + 1 && /\d/.test(match[2]) === ordered && !RULE.test(line) ? match : null;
  };
  let match;
  while (at < lines.length && (match = isItem(lines[at]))) {
    const width = match[0].length;
    const inside = [lines[at].slice(width)];
    at++;
    while (at < lines.length) {
      const line = lines[at];
      if (!line.trim()) {
        // a blank line ends the item, unless what follows is indented under it
        const next = lines[at + 1];
        if (next === undefined || leading(next) < Math.min(width, indent.length + 2) || !next.trim()) break;
        inside.push("");
      } else if (leading(line) > indent.length + 1) inside.push(line.slice(Math.min(leading(line), width)));
      else if (isItem(line) || startsBlock(line)) break;
      else inside.push(line); // a paragraph that goes on
      at++;
    }
    const parts = blocks(inside, depth + 1).map((one) => one.node);
    // a lone paragraph needs no margins of its own
    node.append(element("li", "", ...(parts.length && parts[0].tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts)));
    let next = at;
    while (next < lines.length && !lines[next].trim()) next++;
    if (next < lines.length && isItem(lines[next])) at = next;
  }
  return [node, at];
}

const leading = (line) => line.length - line.trimStart().length;
const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

function table(lines, at) {
  const head = cells(lines[at]);
  const aligns = cells(lines[at + 1]);
  if (head.length !== aligns.length || head.length > 50) return null;
  const align = aligns.map((one) => (one.startsWith(":") ? (one.endsWith(":") ? "mid" : "") : one.endsWith(":") ? "right" : ""));
  const row = (values, name) =>
    element("tr", "", ...head.map((_, column) => element(name, align[column], ...inline(values[column] ?? "", 0))));
  const body = element("tbody");
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) body.append(row(cells(lines[end++]), "td"));
  const node = element("div", "table", element("table", "", element("thead", "", row(head, "th")), body));
  return [node, end];
}

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inside.split("|").map((cell) => cell.trim());
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && (depth >= DEPTH || !startsBlock(lines[end]))) end++;
  return [element("p", "", ...inline(lines.slice(at, end).join("\n"), 0)), end];
}

const PAIRS = [["***", "strong", "em"], ["**", "strong"], ["~~", "del"], ["*", "em"]];
const LINK = /\[([^\]\n]{1,500})\]\(([^()\s]{1,2000})\)/y;
const ADDRESS = /https?:\/\/[^\s<>()"'`*]{1,2000}[^\s<>()"'`*.,;:!?]/y;

/** Nodes of a line's marks: code, strong, emphasis, links. */
function inline(text, depth) {
  if (text.length > LONGEST_INLINE) return [text];
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  const add = (node, length) => {
    flush();
    nodes.push(node);
    at += length;
  };
  let at = 0;
  scan: while (at < text.length) {
    const here = text[at];
    if (here === "\n") {
      add(element("br"), 1);
      continue;
    }
    if (here === "\\" && /[\\`*_~[\]()#+\-.!|>]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (here === "`") {
      const run = /`+/y;
      run.lastIndex = at;
      const mark = run.exec(text)[0];
      const end = text.indexOf(mark, at + mark.length);
      if (end > 0) add(element("code", "", text.slice(at + mark.length, end)), end + mark.length - at);
      else {
        plain += mark;
        at += mark.length;
      }
      continue;
    }
    for (const [mark, outer, inner] of PAIRS) {
      if (depth < DEPTH && text.startsWith(mark, at) && /\S/.test(text[at + mark.length] ?? " ")) {
        const end = closing(text, at + mark.length, mark);
        if (end > 0) {
          const children = inline(text.slice(at + mark.length, end), depth + 1);
          add(element(outer, "", ...(inner ? [element(inner, "", ...children)] : children)), end + mark.length - at);
          continue scan;
        }
      }
    }
    if (here === "[") {
      LINK.lastIndex = at;
      const match = LINK.exec(text);
      const node = match && link(match[2], inline(match[1], DEPTH));
      if (node) {
        add(node, match[0].length);
        continue;
      }
    }
    if (here === "h") {
      ADDRESS.lastIndex = at;
      const match = ADDRESS.exec(text);
      const node = match && link(match[0], [match[0]]);
      if (node) {
        add(node, match[0].length);
        continue;
      }
    }
    plain += here;
    at++;
  }
  flush();
  return nodes;
}

/** Place of the mark that closes an emphasis, or -1. */
function closing(text, from, mark) {
  for (let end = text.indexOf(mark, from + 1); end > 0; end = text.indexOf(mark, end + 1)) {
    if (/\s/.test(text[end - 1])) continue;
    if (mark === "*" && (text[end + 1] === "*" || text[end - 1] === "*")) continue; // of a strong one
    return end;
  }
  return -1;
}

/** A link to a web page, or null for any other kind of address. */
function link(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "https:" && url.protocol !== "http:") return null;
  const node = element("a", "", ...children);
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  node.title = url.href;
  return node;
}
