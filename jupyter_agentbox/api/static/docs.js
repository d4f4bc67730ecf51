// Shows the server's own OpenAPI document, and calls the server. No framework, nothing loaded from elsewhere.
"use strict";

const page = new URL(document.currentScript.src);
const root = page.pathname.replace(/agentbox\/docs\.js$/, "api/agentbox");

function make(tag, props = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
}

function cookie(name) {
  const found = document.cookie.match(new RegExp("(?:^|; )" + name + "=([^;]*)"));
  return found ? found[1] : "";
}

function resolve(doc, schema) {
  return schema && schema.$ref ? doc.components.schemas[schema.$ref.split("/").pop()] : schema;
}

// An example body: the fields that must be there, and a table of all that may.
function example(doc, schema) {
  const found = resolve(doc, schema) || {};
  const body = {};
  for (const name of found.required || []) {
    const type = (resolve(doc, found.properties[name]) || {}).type;
    body[name] = { integer: 0, number: 0, boolean: false, array: [], object: {} }[type] ?? "";
  }
  return JSON.stringify(body, null, 2);
}

function typeOf(doc, schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map((choice) => typeOf(doc, choice)).join(" | ");
  if (schema.type === "array") return "list of " + typeOf(doc, schema.items || {});
  return schema.type || "any";
}

function fields(doc, schema) {
  const found = resolve(doc, schema) || {};
  const table = make("table");
  for (const [name, property] of Object.entries(found.properties || {})) {
    const required = (found.required || []).includes(name);
    const preset = "default" in property ? ` (${JSON.stringify(property.default)})` : "";
    table.append(make("tr", {},
      make("td", {}, make("code", { textContent: name, className: required ? "required" : "" })),
      make("td", { className: "note", textContent: typeOf(doc, property) + preset }),
      make("td", { textContent: property.description || "" })));
  }
  return table;
}

async function show(response, output) {
  output.textContent = `${response.status} ${response.statusText}\n\n`;
  const reader = response.body ? response.body.getReader() : null;
  const decoder = new TextDecoder();
  let text = "";
  while (reader) {
    const { done, value } = await reader.read();
    if (done) break;
    text += decoder.decode(value, { stream: true });
    if (text.length > 200000) { text = text.slice(0, 200000) + "\n… (cut here)"; await reader.cancel(); break; }
    output.textContent = `${response.status} ${response.statusText}\n\n${text}`;
  }
  try {
    output.textContent = `${response.status} ${response.statusText}\n\n${JSON.stringify(JSON.parse(text), null, 2)}`;
  } catch { /* not JSON: shown as it is */ }
}

function form(doc, verb, path, operation) {
  const box = make("div", { className: "inner" });
  if (operation.description) box.append(make("p", { textContent: operation.description }));
  const inputs = [];
  const table = make("table");
  for (const parameter of operation.parameters || []) {
    const input = make("input", { type: "text", placeholder: typeOf(doc, parameter.schema) });
    inputs.push([parameter, input]);
    table.append(make("tr", {},
      make("td", {}, make("code", { textContent: parameter.name, className: parameter.required ? "required" : "" })),
      make("td", {}, input),
      make("td", { className: "note", textContent: parameter.description || parameter.in })));
  }
  box.append(table);
  let body = null;
  const content = operation.requestBody && operation.requestBody.content;
  if (content && content["application/json"]) {
    const schema = content["application/json"].schema;
    body = make("textarea", { value: example(doc, schema) });
    box.append(fields(doc, schema), make("p", {}, body));
  } else if (content) {
    body = make("input", { type: "file" });
    box.append(make("p", {}, body));
  }
  const output = make("pre", { hidden: true });
  const button = make("button", { textContent: "Send" });
  button.addEventListener("click", async () => {
    let target = path;
    const query = new URLSearchParams();
    const headers = { "X-XSRFToken": cookie("_xsrf") };
    for (const [parameter, input] of inputs) {
      if (parameter.in === "path") target = target.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value && parameter.in === "query") query.append(parameter.name, input.value);
      else if (input.value) headers[parameter.name] = input.value;
    }
    const options = { method: verb.toUpperCase(), headers, credentials: "same-origin" };
    if (body) options.body = body.type === "file" ? body.files[0] : body.value;
    output.hidden = false;
    output.textContent = "…";
    try {
      await show(await fetch(root + target + (query.size ? `?${query}` : ""), options), output);
    } catch (error) {
      output.textContent = String(error);
    }
  });
  const statuses = Object.entries(operation.responses).map(([status, one]) => `${status} ${one.description}`).join(", ");
  box.append(make("p", {}, button), make("p", { className: "note", textContent: `Answers: ${statuses}` }), output);
  return box;
}

function render(doc, word) {
  const main = document.getElementById("main");
  main.replaceChildren();
  for (const tag of doc.tags) {
    const section = make("section", {}, make("h2", { textContent: tag.name }));
    for (const [path, verbs] of Object.entries(doc.paths)) {
      for (const [verb, operation] of Object.entries(verbs)) {
        const text = `${verb} ${path} ${operation.summary}`.toLowerCase();
        if (!operation.tags.includes(tag.name) || !text.includes(word)) continue;
        const details = make("details", {}, make("summary", {},
          make("span", { className: "verb", textContent: verb.toUpperCase() }),
          make("span", { className: "path", textContent: path }),
          make("span", { className: "what", textContent: operation.summary })));
        details.addEventListener("toggle", () => {
          if (details.open && details.children.length === 1) details.append(form(doc, verb, path, operation));
        });
        section.append(details);
      }
    }
    if (section.children.length > 1) main.append(section);
  }
}

async function start() {
  const response = await fetch(`${root}/openapi.json`, { credentials: "same-origin" });
  const doc = await response.json();
  if (!response.ok) throw new Error(doc.message);
  document.getElementById("about").textContent = doc.info.description.replaceAll("`", "");
  render(doc, "");
  document.getElementById("find").addEventListener("input", (event) => render(doc, event.target.value.toLowerCase()));
}

start().catch((error) => { document.getElementById("main").textContent = String(error); });
