// What is asked for besides the messages: fields of the request, checked before anything is sent.

import { apiKey, tab } from "./api.js";
import { byId } from "./dom.js";

const STORE = "deepinfer.settings";
const FIELDS = ["system", "temperature", "max-tokens", "seed", "format", "schema", "tools", "tool-choice", "effort-number"];
const NAME = /^[A-Za-z0-9_-]{1,64}$/;

const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, population: { type: "integer" } },
  required: ["name", "population"],
  additionalProperties: false,
};

export const TOOLS_EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the current weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** A field that cannot be sent as it is. */
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** A JSON schema from its text. */
export function parseSchema(text) {
  const schema = parseJson("schema", text);
  if (typeof schema !== "boolean" && (schema === null || typeof schema !== "object" || Array.isArray(schema))) {
    throw new FieldError("schema", "A schema is an object, such as {\"type\": \"object\"}.");
  }
  return schema;
}

/** Tools from their text: a list of functions, each with or without the wrapper of the protocol. */
export function parseTools(text) {
  if (!text.trim()) return [];
  let list = parseJson("tools", text);
  if (!Array.isArray(list)) list = [list];
  const names = new Set();
  return list.map((given, at) => {
    const where = list.length > 1 ? `Tool ${at + 1}` : "The tool";
    const wrapped = given?.type === "function" && given.function;
    const own = wrapped ? given.function : given;
    if (own === null || typeof own !== "object" || Array.isArray(own)) throw new FieldError("tools", `${where} is not an object.`);
    if (typeof own.name !== "string" || !NAME.test(own.name)) {
      throw new FieldError("tools", `${where} needs a name of letters, digits, _ and -, 64 at most.`);
    }
    if (names.has(own.name)) throw new FieldError("tools", `There are two tools called ${own.name}.`);
    names.add(own.name);
    const parameters = own.parameters;
    if (parameters !== undefined && (parameters === null || typeof parameters !== "object" || Array.isArray(parameters))) {
      throw new FieldError("tools", `${own.name}: parameters must be a JSON schema of an object.`);
    }
    return wrapped ? given : { type: "function", function: own };
  });
}

function parseJson(field, text) {
  if (!text.trim()) throw new FieldError(field, "There is nothing here yet.");
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(field, `This is no JSON: ${error.message}`);
  }
}

export class Settings {
  constructor() {
    this.restore();
    byId("key").value = apiKey.get();
    byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
    byId("settings-form").addEventListener("input", () => this.changed());
    byId("effort").addEventListener("input", () => this.changed());
    byId("schema-example").addEventListener("click", () => this.fill("schema", SCHEMA_EXAMPLE));
    byId("tools-example").addEventListener("click", () => this.fill("tools", TOOLS_EXAMPLE));
    byId("defaults").addEventListener("click", () => this.reset());
    this.changed();
  }

  fill(field, value) {
    byId(field).value = JSON.stringify(value, null, 2);
    this.changed();
  }

  changed() {
    byId("schema-field").hidden = byId("format").value !== "json_schema";
    byId("effort-number").hidden = this.effort !== "own";
    const key = byId("key").value.trim();
    if (key !== apiKey.get()) {
      apiKey.set(key);
      document.dispatchEvent(new Event("key-changed"));
    }
    const kept = Object.fromEntries(FIELDS.map((field) => [field, byId(field).value]));
    tab.set(STORE, JSON.stringify({ ...kept, effort: this.effort }));
    this.check();
  }

  restore() {
    let kept = {};
    try {
      kept = JSON.parse(tab.get(STORE) ?? "{}");
    } catch {
      // of another version
    }
    for (const field of FIELDS) if (typeof kept[field] === "string") byId(field).value = kept[field];
    const radio = document.querySelector(`input[name="effort"][value="${CSS.escape(kept.effort ?? "")}"]`);
    if (radio) radio.checked = true;
  }

  reset() {
    byId("settings-form").reset();
    document.querySelector('input[name="effort"][value="high"]').checked = true;
    this.changed();
  }

  get effort() {
    return document.querySelector('input[name="effort"]:checked').value;
  }

  get system() {
    return byId("system").value.trim();
  }

  get asJson() {
    return byId("format").value !== "text";
  }

  /** Shows what is wrong beside the fields. Returns the first FieldError, or null. */
  check() {
    let wrong = null;
    for (const field of ["numbers", "schema", "tools"]) {
      let problem = null;
      try {
        if (field === "numbers") this.numbers();
        else if (field === "tools") parseTools(byId("tools").value);
        else if (byId("format").value === "json_schema") parseSchema(byId("schema").value);
      } catch (error) {
        problem = error;
      }
      const empty = field === "schema" && !byId("schema").value.trim(); // not wrong before it is tried
      byId(`${field}-error`).textContent = problem && !empty ? problem.message : "";
      for (const input of field === "numbers" ? ["temperature", "max-tokens", "seed", "effort-number"] : [field]) {
        byId(input).setAttribute("aria-invalid", String(problem?.field === input && !empty));
      }
      wrong ??= problem;
    }
    return wrong;
  }

  numbers() {
    const fields = {};
    const read = (field, name, words, valid) => {
      const input = byId(field);
      if (!input.value && !input.validity.badInput) return;
      const value = input.valueAsNumber;
      if (!valid(value)) throw new FieldError(field, words);
      fields[name] = value;
    };
    read("temperature", "temperature", "Temperature is a number from 0 to 2.", (value) => value >= 0 && value <= 2);
    read("max-tokens", "max_tokens", "Max tokens is a whole number above 0.", (value) => Number.isInteger(value) && value > 0);
    read("seed", "seed", "A seed is a whole number, 0 or above.", (value) => Number.isSafeInteger(value) && value >= 0);
    if (this.effort === "off") fields.thinking = { type: "disabled" };
    else if (this.effort !== "own") fields.reasoning_effort = this.effort;
    else {
      fields.reasoning_effort = NaN;
      read("effort-number", "reasoning_effort", "Effort is a whole number from 1 to 100.", (value) => Number.isInteger(value) && value >= 1 && value <= 100);
      if (Number.isNaN(fields.reasoning_effort)) throw new FieldError("effort-number", "Effort is a whole number from 1 to 100.");
    }
    return fields;
  }

  /** The request's fields. FieldError. */
  fields() {
    const wrong = this.check();
    if (wrong) {
      byId(`${["schema", "tools"].includes(wrong.field) ? wrong.field : "numbers"}-error`).textContent = wrong.message;
      throw wrong;
    }
    const fields = this.numbers();
    const format = byId("format").value;
    if (format === "json_object") fields.response_format = { type: "json_object" };
    if (format === "json_schema") {
      const schema = parseSchema(byId("schema").value);
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    }
    const tools = parseTools(byId("tools").value);
    if (tools.length) {
      fields.tools = tools;
      fields.tool_choice = byId("tool-choice").value;
    }
    return fields;
  }
}
