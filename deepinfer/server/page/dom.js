// Making nodes. Texts become text nodes, never HTML.

/** An element. properties: of the node; those with a dash are attributes. Children that are null are left out. */
export function make(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-")) node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** A button that does nothing but call `action`. */
export function button(text, className, action) {
  const node = make("button", { type: "button", className, textContent: text });
  node.addEventListener("click", action);
  return node;
}

export const byId = (id) => document.getElementById(id);
