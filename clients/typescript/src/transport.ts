import { AgentboxError } from "./errors.js";
import { readEvents } from "./events.js";
import { ROUTES, type EventStreams, type operations } from "./schema.js";

export interface ClientOptions {
  /** Address of the Jupyter server, its base URL included: `http://localhost:8888/`. */
  url: string;
  /** A token of the server, or one for a single sandbox. Without one, the browser's login is used. */
  token?: string;
  /** More headers of every request, asked for anew each time. */
  headers?: () => Record<string, string>;
  /** In place of the global `fetch`. */
  fetch?: typeof fetch;
}

export type OperationName = keyof operations;
type Json<R> = R extends { content: { "application/json": infer T } } ? T : void;

/** What an operation answers. */
export type Answer<N extends OperationName> = operations[N]["responses"] extends infer R
  ? R extends { 200: infer A }
    ? Json<A>
    : R extends { 201: infer A }
      ? Json<A>
      : R extends { 202: infer A }
        ? Json<A>
        : void
  : never;

type Content<N extends OperationName> = operations[N] extends { requestBody?: infer R } ? NonNullable<R> : never;
/** What an operation takes as its body. */
export type Body<N extends OperationName> = Content<N> extends { content: { "application/json": infer T } } ? T : never;
/** What an operation takes in its query. */
export type Query<N extends OperationName> = NonNullable<operations[N]["parameters"]["query"]>;

export interface Arguments<N extends OperationName> {
  /** Parameters in the path. */
  path?: operations[N]["parameters"]["path"];
  query?: Query<N>;
  body?: Body<N>;
  /** Ends the call, and what it has begun in the sandbox. */
  signal?: AbortSignal | undefined;
}

/** One event of a stream: its name in `event`, and its own `data`. */
export type EventOf<N extends keyof EventStreams> = {
  [K in keyof EventStreams[N]]: { event: K; data: EventStreams[N][K] };
}[keyof EventStreams[N]];

/** The last event of each stream; one that ends without it has broken off. */
const LAST: Partial<Record<keyof EventStreams, string>> = {
  stream_code: "done",
  stream_command: "exit",
  follow_process: "exit",
  stream_installation: "result",
};

export interface RawArguments {
  path?: unknown;
  query?: unknown;
  body?: BodyInit;
  headers?: Record<string, string>;
  signal?: AbortSignal | undefined;
}

/** Sends requests to one server and to no other, and turns what fails into errors. */
export class Transport {
  readonly #root: string;
  readonly #options: ClientOptions;

  constructor(options: ClientOptions) {
    this.#root = new URL("api/agentbox", options.url.endsWith("/") ? options.url : options.url + "/").href;
    this.#options = options;
  }

  /** Call an operation by its name in the OpenAPI document; everything that the API can do is reached so. */
  async call<N extends OperationName>(name: N, args: Arguments<N> = {}): Promise<Answer<N>> {
    const response = await this.send(name, json(args));
    return (response.status === 204 ? undefined : await response.json()) as Answer<N>;
  }

  /** Call an operation that answers events, and read them as they happen. Whoever stops reading ends the call. */
  async *stream<N extends keyof EventStreams & OperationName>(
    name: N,
    args: Arguments<N> = {},
  ): AsyncGenerator<EventOf<N>, void, undefined> {
    const response = await this.send(name, json(args));
    if (response.body === null) throw new AgentboxError("the answer has no body", "link_closed");
    for await (const { event, data } of readEvents(response.body)) {
      if (event === "failure") throw AgentboxError.from(0, data);
      yield { event, data: JSON.parse(data) } as EventOf<N>;
      if (event === LAST[name]) return;
    }
    if (name in LAST) throw new AgentboxError("the stream of events broke off", "link_closed");
  }

  /** Send a request and return the answer, of which the body is unread. Throws AgentboxError if it is an error. */
  async send(name: OperationName, { path, query, body, headers, signal }: RawArguments): Promise<Response> {
    const [method, template] = ROUTES[name];
    const { token, fetch = globalThis.fetch } = this.#options;
    const init: RequestInit & { duplex?: "half" } = {
      method,
      headers: { ...this.#options.headers?.(), ...(token ? { Authorization: `token ${token}` } : xsrf()), ...headers },
      // A token goes to the server that it is meant for.
      redirect: "error",
      credentials: token ? "omit" : "same-origin",
      cache: "no-store",
    };
    if (signal) init.signal = signal;
    if (body !== undefined) {
      init.body = body;
      if (typeof ReadableStream !== "undefined" && body instanceof ReadableStream) init.duplex = "half";
    }
    const address = this.#root + fill(template, path) + search(query);
    let response: Response;
    try {
      response = await fetch(address, init);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new AgentboxError(`the server did not answer: ${error}`, "unreachable", 0, null, null, { cause: error });
    }
    if (!response.ok) throw AgentboxError.from(response.status, await response.text());
    return response;
  }
}

function json(args: { path?: unknown; query?: unknown; body?: unknown; signal?: AbortSignal | undefined }): RawArguments {
  const { path, query, body, signal } = args;
  if (body === undefined) return { path, query, signal };
  return { path, query, signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
}

function fill(template: string, path: unknown): string {
  const values = (path ?? {}) as Record<string, unknown>;
  return template.replace(/{(\w+)}/g, (_, name: string) => {
    const value = String(values[name] ?? "");
    // Of these an address would make another one.
    if (value === "" || value === "." || value === "..") {
      throw new AgentboxError(`${JSON.stringify(value)} can't be a ${name}`, "invalid_request", 0, name);
    }
    return encodeURIComponent(value);
  });
}

function search(query: unknown): string {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== undefined && item !== null) found.append(name, String(item));
    }
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

/** What Jupyter wants to see of a page that is logged in by cookie. */
function xsrf(): Record<string, string> {
  const page = (globalThis as { document?: { cookie?: string } }).document;
  const match = /(?:^|; ?)_xsrf=([^;]*)/.exec(page?.cookie ?? "");
  return match?.[1] ? { "X-XSRFToken": match[1] } : {};
}
