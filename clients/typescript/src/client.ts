import type { components } from "./schema.js";
import { Transport, type Answer, type Body, type ClientOptions, type EventOf, type Query } from "./transport.js";

/** Bytes that are held in memory to be hashed before an upload, at most. */
const MAX_HASHED = 256 * 1024 * 1024;

type Schemas = components["schemas"];
export type SandboxInfo = Schemas["SandboxInfo"];
export type SandboxRequest = Schemas["SandboxRequest"];
export type ExecAnswer = Schemas["ExecAnswer"];
export type Entry = Schemas["Entry"];
export type SnapshotInfo = Schemas["SnapshotInfo"];

interface Signal {
  /** Ends the call, and what it has begun in the sandbox. */
  signal?: AbortSignal;
}
export type ExecOptions = Omit<Body<"run_command">, "command" | "argv"> & Signal;
export type CodeOptions = Omit<Body<"run_code">, "code"> & Signal;
export type SnapshotOptions = Body<"take_snapshot"> & Signal;
export type ForkOptions = Body<"fork_sandbox"> & Signal;
export type InstallOptions = Omit<Body<"install_packages">, "packages"> & Signal;

/** A Jupyter server's sandboxes. What has no method of its own here is reached by {@link Transport.call}. */
export class AgentboxClient extends Transport {
  constructor(options: ClientOptions) {
    super(options);
  }

  /** Make a sandbox, or get the one of that `id` that was asked for in the same words. */
  async create(request: SandboxRequest = {}, { signal }: Signal = {}): Promise<Sandbox> {
    const info = await this.call("create_sandbox", { body: request, signal });
    return new Sandbox(this, info.id);
  }

  /** A sandbox that is there, be it a notebook's: by its id or by its kernel's. Nothing is asked of the server. */
  sandbox(id: string): Sandbox {
    return new Sandbox(this, id);
  }

  /** Describe all sandboxes that the caller may see, oldest first. */
  async list(query: Query<"list_sandboxes"> = {}): Promise<SandboxInfo[]> {
    return (await this.call("list_sandboxes", { query })).sandboxes;
  }

  /** Describe all snapshots of the caller's, oldest first. */
  async snapshots(): Promise<SnapshotInfo[]> {
    return (await this.call("list_all_snapshots")).snapshots;
  }

  /** Remove a snapshot. Sandboxes that came from it stay as they are. */
  async deleteSnapshot(id: string): Promise<void> {
    await this.call("delete_snapshot", { path: { snapshot: id } });
  }

  /** Whether sandboxes can be started. */
  health(): Promise<Answer<"get_health">> {
    return this.call("get_health");
  }
}

/** One sandbox. */
export class Sandbox {
  /** Files of `/workspace`. */
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

  /** What it is, and how it ended. Does not count as use. */
  info(): Promise<SandboxInfo> {
    return this.client.call("get_sandbox", { path: this.#path });
  }

  /** Change what it may reach, how long it lives, or its labels. */
  update(changes: Body<"patch_sandbox">): Promise<SandboxInfo> {
    return this.client.call("patch_sandbox", { path: this.#path, body: changes });
  }

  /** End it and forget it. */
  async delete(): Promise<void> {
    await this.client.call("delete_sandbox", { path: this.#path });
  }

  /** Run a command to its end: a line for the shell, or a program with its arguments. */
  exec(command: string | string[], { signal, ...options }: ExecOptions = {}): Promise<ExecAnswer> {
    return this.client.call("run_command", { path: this.#path, body: { ...options, ...split(command) }, signal });
  }

  /** Run a command, and read what it prints as it does. Whoever stops reading kills it. */
  execStream(
    command: string | string[],
    { signal, ...options }: ExecOptions = {},
  ): AsyncGenerator<EventOf<"stream_command">, void, undefined> {
    return this.client.stream("stream_command", { path: this.#path, body: { ...options, ...split(command) }, signal });
  }

  /** Run code in one of its persistent kernels; of a notebook's sandbox, in the notebook's own. */
  runCode(code: string, { signal, ...options }: CodeOptions = {}): Promise<Answer<"run_code">> {
    return this.client.call("run_code", { path: this.#path, body: { ...options, code }, signal });
  }

  /** Run code, and read its outputs as they come. Whoever stops reading interrupts it, unless `keep_running`. */
  runCodeStream(
    code: string,
    { signal, ...options }: CodeOptions = {},
  ): AsyncGenerator<EventOf<"stream_code">, void, undefined> {
    return this.client.stream("stream_code", { path: this.#path, body: { ...options, code }, signal });
  }

  /** Install packages. One that can't be is an answer too: `is_ok` is false, and `message` says why. */
  install(packages: string[], { signal, ...options }: InstallOptions = {}): Promise<Answer<"install_packages">> {
    return this.client.call("install_packages", { path: this.#path, body: { ...options, packages }, signal });
  }

  /** Save it as it is, variables, running programs and files, while it goes on. */
  snapshot({ signal, ...options }: SnapshotOptions = {}): Promise<SnapshotInfo> {
    return this.client.call("take_snapshot", { path: this.#path, body: options, signal });
  }

  /** Describe its snapshots, oldest first. */
  async snapshots(): Promise<SnapshotInfo[]> {
    return (await this.client.call("list_snapshots", { path: this.#path })).snapshots;
  }

  /** Take it back to one of its snapshots: undo. What happened since is lost. */
  restore(snapshot: string, { signal }: Signal = {}): Promise<SandboxInfo> {
    return this.client.call("restore_sandbox", { path: this.#path, body: { snapshot }, signal });
  }

  /** Start another sandbox that goes on where this one is, or where `snapshot` was taken. */
  async fork({ signal, ...options }: ForkOptions = {}): Promise<Sandbox> {
    const info = await this.client.call("fork_sandbox", { path: this.#path, body: options, signal });
    return new Sandbox(this.client, info.id);
  }
}

/** Files of a sandbox's `/workspace`; paths are relative to it. */
export class Files {
  constructor(
    readonly client: Transport,
    readonly id: string,
  ) {}

  get #path(): { id: string } {
    return { id: this.id };
  }

  /** Read a file, or lines of it. */
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
   * Write a file of any size. It is there whole or not at all: the server compares its size, and of up to 256 MiB
   * its SHA-256. Of a stream it sees the end alone.
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
      // Browsers have it on secure pages only.
      const subtle = globalThis.crypto?.subtle;
      if (subtle !== undefined && blob.size <= MAX_HASHED) query.sha256 = hex(await subtle.digest("SHA-256", await blob.arrayBuffer()));
    }
    const headers = { "Content-Type": "application/octet-stream" };
    const response = await this.client.send("upload_file", { path: this.#path, query, body, headers, signal });
    return (await response.json()) as Entry;
  }

  /** Read a file of any size: the answer's body is a stream; `arrayBuffer()`, `blob()` and `text()` read it whole. */
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
