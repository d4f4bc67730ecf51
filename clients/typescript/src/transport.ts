import { AgentboxError } from "./errors.js";
import { readEvents } from "./events.js";
import { ROUTES, type EventStreams, type operations } from "./schema.js";

export interface ClientOptions {
  /** URL of the Jupyter server, including its base URL: `http://localhost:8888/`. */
  url: string;
  /** Token of the server, or of a single sandbox. Without a token, the browser's login is used. */
  token?: string;
  /** Return additional headers. Called for every request. */
  headers?: () => Record<string, string>;
  /** Replacement for the global `fetch`. */
  fetch?: typeof fetch;
}

export type OperationName = keyof operations;
type Json<R> = R extends { content: { "application/json": infer T } } ? T : void;

/** Response of an operation. */
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
/** Request body of an operation. */
export type Body<N extends OperationName> = Content<N> extends { content: { "application/json": infer T } } ? T : never;
/** Query parameters of an operation. */
export type Query<N extends OperationName> = NonNullable<operations[N]["parameters"]["query"]>;

export interface Arguments<N extends OperationName> {
  /** Path parameters. */
  path?: operations[N]["parameters"]["path"];
  query?: Query<N>;
  body?: Body<N>;
  /** Aborts the call and ends the process or cell that it started in the sandbox. */
  signal?: AbortSignal | undefined;
}

/** An event of a stream: its name in `event`, and its `data`. */
export type EventOf<N extends keyof EventStreams> = {
  [K in keyof EventStreams[N]]: { event: K; data: EventStreams[N][K] };
}[keyof EventStreams[N]];

/** The last event of each stream. A stream that ends without it was interrupted. */
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

/** Sends requests to one server only, and converts failures to errors. */
export class Transport {
  readonly #root: string;
  readonly #options: ClientOptions;

  constructor(options: ClientOptions) {
    this.#root = new URL("api/agentbox", options.url.endsWith("/") ? options.url : options.url + "/").href;
    this.#options = options;
  }

  /** Call any operation of the API by its name in the OpenAPI document. */
  async call<N extends OperationName>(name: N, args: Arguments<N> = {}): Promise<Answer<N>> {
    const response = await this.send(name, json(args));
    return (response.status === 204 ? undefined : await response.json()) as Answer<N>;
  }

  /** Call an operation that returns events, and stream them. Leaving the loop ends the call. */
  async *stream<N extends keyof EventStreams & OperationName>(
    name: N,
    args: Arguments<N> = {},
  ): AsyncGenerator<EventOf<N>, void, undefined> {
    const response = await this.send(name, json(args));
    if (response.body === null) throw new AgentboxError("the response has no body", "link_closed");
    for await (const { event, data } of readEvents(response.body)) {
      if (event === "failure") throw AgentboxError.from(0, data);
      yield { event, data: JSON.parse(data) } as EventOf<N>;
      if (event === LAST[name]) return;
    }
    if (name in LAST) throw new AgentboxError("the event stream was interrupted", "link_closed");
  }

  /** Send a request and return the response with its body unread. Throws AgentboxError for an error status. */
  async send(name: OperationName, { path, query, body, headers, signal }: RawArguments): Promise<Response> {
    const [method, template] = ROUTES[name];
    const { token, fetch = globalThis.fetch } = this.#options;
    const init: RequestInit & { duplex?: "half" } = {
      method,
      headers: { ...this.#options.headers?.(), ...(token ? { Authorization: `token ${token}` } : xsrf()), ...headers },
      // Never send the token to another server.
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
    // These values would change the URL's path.
    if (value === "" || value === "." || value === "..") {
      throw new AgentboxError(`${JSON.stringify(value)} is not a valid ${name}`, "invalid_request", 0, name);
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

/** Return Jupyter's XSRF header, which a page with a login cookie must send. */
function xsrf(): Record<string, string> {
  const page = (globalThis as { document?: { cookie?: string } }).document;
  const match = /(?:^|; ?)_xsrf=([^;]*)/.exec(page?.cookie ?? "");
  return match?.[1] ? { "X-XSRFToken": match[1] } : {};
}
