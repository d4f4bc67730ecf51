import type { components } from "./schema.js";
import { Transport, type Answer, type Body, type ClientOptions, type EventOf, type Query } from "./transport.js";

/** Maximum size in bytes of an upload that is hashed in memory. */
const MAX_HASHED = 256 * 1024 * 1024;

type Schemas = components["schemas"];
export type SandboxInfo = Schemas["SandboxInfo"];
export type SandboxRequest = Schemas["SandboxRequest"];
export type ExecAnswer = Schemas["ExecAnswer"];
export type Entry = Schemas["Entry"];
export type SnapshotInfo = Schemas["SnapshotInfo"];

interface Signal {
  /** Aborts the call and ends the process or cell that it started in the sandbox. */
  signal?: AbortSignal;
}
export type ExecOptions = Omit<Body<"run_command">, "command" | "argv"> & Signal;
export type CodeOptions = Omit<Body<"run_code">, "code"> & Signal;
export type SnapshotOptions = Body<"take_snapshot"> & Signal;
export type ForkOptions = Body<"fork_sandbox"> & Signal;
export type InstallOptions = Omit<Body<"install_packages">, "packages"> & Signal;

/** Client for the sandboxes of a Jupyter server. For operations without a method, use {@link Transport.call}. */
export class AgentboxClient extends Transport {
  constructor(options: ClientOptions) {
    super(options);
  }

  /** Create a sandbox, or return the existing one with this `id` if it was created with the same request. */
  async create(request: SandboxRequest = {}, { signal }: Signal = {}): Promise<Sandbox> {
    const info = await this.call("create_sandbox", { body: request, signal });
    return new Sandbox(this, info.id);
  }

  /** Return an existing sandbox by its id or by the id of a notebook's kernel. Sends no request. */
  sandbox(id: string): Sandbox {
    return new Sandbox(this, id);
  }

  /** List all sandboxes that the caller has access to, oldest first. */
  async list(query: Query<"list_sandboxes"> = {}): Promise<SandboxInfo[]> {
    return (await this.call("list_sandboxes", { query })).sandboxes;
  }

  /** List all snapshots of the caller, oldest first. */
  async snapshots(): Promise<SnapshotInfo[]> {
    return (await this.call("list_all_snapshots")).snapshots;
  }

  /** Delete a snapshot. Sandboxes that were restored or forked from it are not affected. */
  async deleteSnapshot(id: string): Promise<void> {
    await this.call("delete_snapshot", { path: { snapshot: id } });
  }

  /** Return whether sandboxes can be started. */
  health(): Promise<Answer<"get_health">> {
    return this.call("get_health");
  }
}

/** A sandbox. */
export class Sandbox {
  /** Files in `/workspace`. */
  readonly files: Files;

  constructor(
    readonly client: Transport,
    readonly id: string,
  ) {
    this.files = new Files(client, id);
  }

  get #path(): { id: string } {
    return { id: this.id };
  }

  /** Return the sandbox's properties and state, and how it ended. Does not count as use. */
  info(): Promise<SandboxInfo> {
    return this.client.call("get_sandbox", { path: this.#path });
  }

  /** Change the sandbox's allowed hosts, timeouts or labels. */
  update(changes: Body<"patch_sandbox">): Promise<SandboxInfo> {
    return this.client.call("patch_sandbox", { path: this.#path, body: changes });
  }

  /** End and remove the sandbox. */
  async delete(): Promise<void> {
    await this.client.call("delete_sandbox", { path: this.#path });
  }

  /** Run a shell command, or a program with arguments, until it exits. */
  exec(command: string | string[], { signal, ...options }: ExecOptions = {}): Promise<ExecAnswer> {
    return this.client.call("run_command", { path: this.#path, body: { ...options, ...split(command) }, signal });
  }

  /** Run a command and stream its output. Leaving the loop kills the command. */
  execStream(
    command: string | string[],
    { signal, ...options }: ExecOptions = {},
  ): AsyncGenerator<EventOf<"stream_command">, void, undefined> {
    return this.client.stream("stream_command", { path: this.#path, body: { ...options, ...split(command) }, signal });
  }

  /** Run code in a persistent kernel. In the sandbox of a notebook, this is the notebook's kernel. */
  runCode(code: string, { signal, ...options }: CodeOptions = {}): Promise<Answer<"run_code">> {
    return this.client.call("run_code", { path: this.#path, body: { ...options, code }, signal });
  }

  /** Run code and stream its outputs. Leaving the loop interrupts the code, unless `keep_running` is set. */
  runCodeStream(
    code: string,
    { signal, ...options }: CodeOptions = {},
  ): AsyncGenerator<EventOf<"stream_code">, void, undefined> {
    return this.client.stream("stream_code", { path: this.#path, body: { ...options, code }, signal });
  }

  /** Install packages. If this fails, nothing is thrown: `is_ok` is false, and `message` contains the reason. */
  install(packages: string[], { signal, ...options }: InstallOptions = {}): Promise<Answer<"install_packages">> {
    return this.client.call("install_packages", { path: this.#path, body: { ...options, packages }, signal });
  }

  /** Take a snapshot of variables, running programs and files. The sandbox keeps running. */
  snapshot({ signal, ...options }: SnapshotOptions = {}): Promise<SnapshotInfo> {
    return this.client.call("take_snapshot", { path: this.#path, body: options, signal });
  }

  /** List the sandbox's snapshots, oldest first. */
  async snapshots(): Promise<SnapshotInfo[]> {
    return (await this.client.call("list_snapshots", { path: this.#path })).snapshots;
  }

  /** Restore the sandbox to one of its snapshots. Later changes are lost. */
  restore(snapshot: string, { signal }: Signal = {}): Promise<SandboxInfo> {
    return this.client.call("restore_sandbox", { path: this.#path, body: { snapshot }, signal });
  }

  /** Start a copy of the sandbox, from its current state or from `snapshot`. */
  async fork({ signal, ...options }: ForkOptions = {}): Promise<Sandbox> {
    const info = await this.client.call("fork_sandbox", { path: this.#path, body: options, signal });
    return new Sandbox(this.client, info.id);
  }
}

/** Files in the `/workspace` of a sandbox. Paths are relative to it. */
export class Files {
  constructor(
    readonly client: Transport,
    readonly id: string,
  ) {}

  get #path(): { id: string } {
    return { id: this.id };
  }

  /** Read a file, or a range of its lines. */
  read(path: string, query: Omit<Query<"read_file">, "path"> = {}): Promise<Answer<"read_file">> {
    return this.client.call("read_file", { path: this.#path, query: { ...query, path } });
  }

  /** Write text to a file. */
  write(path: string, text: string, options: Omit<Body<"write_file">, "path" | "text"> = {}): Promise<Entry> {
    return this.client.call("write_file", { path: this.#path, body: { ...options, path, text } });
  }

  /** List a directory. */
  list(path = ".", query: Omit<Query<"list_files">, "path"> = {}): Promise<Answer<"list_files">> {
    return this.client.call("list_files", { path: this.#path, query: { ...query, path } });
  }

  /** Delete a file or a directory. */
  delete(path: string, options: Omit<Body<"delete_file">, "path"> = {}): Promise<Answer<"delete_file">> {
    return this.client.call("delete_file", { path: this.#path, body: { ...options, path } });
  }

  /**
   * Upload a file of any size. The file appears only when it is complete. The server verifies its size, and its
   * SHA-256 up to 256 MiB. For a stream, it can verify only that the stream ended properly.
   */
  async upload(
    path: string,
    data: Blob | Uint8Array | string | ReadableStream<Uint8Array>,
    { signal }: Signal = {},
  ): Promise<Entry> {
    const query: Query<"upload_file"> = { path };
    let body = data as BodyInit;
    if (!(typeof ReadableStream !== "undefined" && data instanceof ReadableStream)) {
      const blob = data instanceof Blob ? data : new Blob([data as BlobPart]);
      body = blob;
      query.size = blob.size;
      // Browsers provide it only on secure pages.
      const subtle = globalThis.crypto?.subtle;
      if (subtle !== undefined && blob.size <= MAX_HASHED) query.sha256 = hex(await subtle.digest("SHA-256", await blob.arrayBuffer()));
    }
    const headers = { "Content-Type": "application/octet-stream" };
    const response = await this.client.send("upload_file", { path: this.#path, query, body, headers, signal });
    return (await response.json()) as Entry;
  }

  /** Download a file of any size. The body of the response is a stream; `arrayBuffer()`, `blob()` and `text()` read all of it. */
  download(path: string, { signal }: Signal = {}): Promise<Response> {
    return this.client.send("download_file", { path: this.#path, query: { path }, signal });
  }
}

function split(command: string | string[]): { command: string } | { argv: string[] } {
  return typeof command === "string" ? { command } : { argv: command };
}

function hex(digest: ArrayBuffer): string {
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
