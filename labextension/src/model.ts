/** Sandbox data shared by all views. Refreshed by events; resource use is polled for the current notebook only. */
import type { ServiceManager } from '@jupyterlab/services';
import { PageConfig } from '@jupyterlab/coreutils';
import { Signal, type ISignal } from '@lumino/signaling';

import { AgentboxClient, type AgentboxError } from '../../clients/typescript/src/index.js';
import { findEnding } from './rows.js';
import { cpuShare, type Ending, type Info, type Trans, type Usage } from './words.js';

/** `here`: available. `gateway`: kernels run on a gateway. `failed`: invalid configuration. `absent`: no server extension. */
export type Mode = 'here' | 'gateway' | 'failed' | 'absent';

/** A connection that was refused. */
export interface Refused {
  sandbox: string;
  host: string;
  port: number;
  reason: string;
}

/** Something that the user of a sandbox should know, while the sandbox continues. */
export interface Notice {
  sandbox: string;
  message: string;
  setting: string;
}

/** In milliseconds: the delay between an event and a refresh, and the polling intervals of one notebook and of all. */
const SETTLE = 300;
const POLL = 5000;
const POLL_ALL = 20000;
const SCHEMA = 'https://events.jupyter-agentbox.readthedocs.io/';
/** Causes of requested ends, shown only if the kernel does not come back. */
const MEANT = new Set(['stopped', '']);
const MAX_ENDINGS = 100;
/** Seconds by which the event of a stop may precede the loss of the kernel. */
const LOSS = 60;

export class Model {
  readonly mode: Mode;
  /** URL of the gateway, or the configuration error. */
  readonly note: string;
  /** Path of the user's configuration file; empty where only an administrator changes settings. */
  readonly settingsFile: string;
  readonly client: AgentboxClient;
  readonly endings = new Map<string, Ending>();
  /** Kernel id of the current notebook, whose resource use is polled. */
  watched: string | null = null;
  /** Whether the side panel is visible. */
  isListed = false;
  /** Why the last refresh failed; empty if it succeeded. */
  problem = '';

  private readonly _changed = new Signal<this, void>(this);
  private readonly _refused = new Signal<this, Refused>(this);
  private readonly _noticed = new Signal<this, Notice>(this);
  private readonly _touched = new Signal<this, string>(this);
  private _infos: Info[] = [];
  private _paths = new Map<string, string>();
  private _busy = new Set<string>();
  private readonly _stops = new Map<string, Ending>();
  private _before = new Map<string, { last: Usage; share: number | undefined }>();
  private _timer = 0;
  private _looked = 0;

  constructor(
    readonly services: ServiceManager.IManager,
    readonly trans: Trans
  ) {
    const mode = PageConfig.getOption('agentbox');
    this.mode = mode === 'here' || mode === 'gateway' || mode === 'failed' ? mode : 'absent';
    this.note = PageConfig.getOption('agentboxNote');
    this.settingsFile = PageConfig.getOption('agentboxSettings');
    const { baseUrl, token } = services.serverSettings;
    this.client = new AgentboxClient({ url: new URL(baseUrl, location.href).href, ...(token ? { token } : {}) });
    if (this.mode !== 'here') {
      return;
    }
    services.events.stream.connect((_, event) => {
      this._onEvent(event as unknown as Record<string, string>);
    });
    services.sessions.runningChanged.connect(() => {
      this._readSessions();
      this.refreshSoon();
    });
    services.kernels.runningChanged.connect(() => {
      this._readSessions();
      this._changed.emit();
    });
    this._readSessions();
    this.refreshSoon();
    setInterval(() => {
      void this._poll();
    }, POLL);
  }

  /** Emitted when the data changes. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Emitted when a connection is refused. */
  get refused(): ISignal<this, Refused> {
    return this._refused;
  }

  /** Emitted when the server has a notice for the user of a sandbox. */
  get noticed(): ISignal<this, Notice> {
    return this._noticed;
  }

  /** Emitted with the `sandbox_id` when a sandbox's audit log has new rows. */
  get touched(): ISignal<this, string> {
    return this._touched;
  }

  get infos(): readonly Info[] {
    return this._infos;
  }

  /** Notebook paths by kernel id. */
  get paths(): ReadonlyMap<string, string> {
    return this._paths;
  }

  /** Find a sandbox by its id, its `sandbox_id` or that of a kernel in it. */
  find(id: string | null | undefined): Info | undefined {
    if (!id) {
      return undefined;
    }
    return this._infos.find(info => info.sandbox_id === id || info.id === id || info.kernels.some(kernel => kernel.id === id));
  }

  /** Return the number of CPUs in use. */
  share(info: Info): number | undefined {
    return this._before.get(info.sandbox_id ?? '')?.share;
  }

  /** Return whether the notebook's kernel is busy. */
  isBusy(info: Info): boolean {
    return info.kernels.some(kernel => this._busy.has(kernel.id));
  }

  /** Return whether a kernelspec is sandboxed. */
  isBoxedSpec(name: string | undefined): boolean {
    return this.stanza(name) !== undefined;
  }

  /** Return the provisioner configuration of a sandboxed kernelspec. */
  stanza(name: string | undefined): Record<string, unknown> | undefined {
    const metadata = this.services.kernelspecs.specs?.kernelspecs[name ?? '']?.metadata as Record<string, unknown> | undefined;
    const found = metadata?.['kernel_provisioner'] as { provisioner_name?: string; config?: Record<string, unknown> } | undefined;
    return found?.provisioner_name === 'agentbox-provisioner' ? (found.config ?? {}) : undefined;
  }

  /** Schedule one refresh for all events that arrive at about the same time. */
  refreshSoon(): void {
    if (this.mode === 'here' && this._timer === 0) {
      this._timer = window.setTimeout(() => {
        this._timer = 0;
        void this.refresh();
      }, SETTLE);
    }
  }

  async refresh(): Promise<void> {
    if (this.mode !== 'here') {
      return;
    }
    this._looked = Date.now();
    try {
      this._take(await this.client.list());
      this.problem = '';
    } catch (error) {
      this.problem = (error as AgentboxError).message;
    }
    this._changed.emit();
  }

  dismiss(kernel: string): void {
    this.endings.delete(kernel);
    this._changed.emit();
  }

  /** Record that a kernel died and is restarting. The event with the cause may arrive later. */
  noteDeath(kernel: string): void {
    if (!this.endings.has(kernel)) {
      this._note(this.endings, guess(kernel, ''));
      this._changed.emit();
    }
  }

  /**
   * Record that a kernel ended and is not restarting. Looks up the cause in the server's log if this page missed the event.
   *
   * @param since - when the kernel was last seen, in seconds since the epoch.
   * @param wasAway - whether the server was unavailable.
   */
  async noteLoss(kernel: string, since: number, wasAway: boolean): Promise<void> {
    const stop = this._stops.get(kernel);
    const isStop = stop !== undefined && stop.time > since - LOSS;
    const found = isStop || this.endings.has(kernel) ? undefined : await this._lookUp(kernel);
    const known = this.endings.get(kernel);
    if (isStop && (!known || known.time <= stop.time)) {
      this._note(this.endings, stop);
    } else if (!known) {
      this._note(this.endings, found ?? guess(kernel, wasAway ? 'lease_over' : ''));
    }
    this._changed.emit();
  }

  /** Look up in the log how a kernel ended. Returns undefined if the user may not read the log. */
  private async _lookUp(kernel: string): Promise<Ending | undefined> {
    try {
      const { rows } = await this.client.call('get_audit', { query: { kind: 'lifecycle', limit: 1000 } });
      return findEnding(rows, kernel);
    } catch {
      return undefined;
    }
  }

  private _note(map: Map<string, Ending>, ending: Ending): void {
    map.delete(ending.kernel);
    map.set(ending.kernel, ending);
    for (const [oldest] of map) {
      if (map.size <= MAX_ENDINGS) {
        break;
      }
      map.delete(oldest);
    }
  }

  private _take(infos: Info[]): void {
    this._infos = infos;
    const before = this._before;
    this._before = new Map();
    for (const info of infos) {
      if (info.sandbox_id && info.usage) {
        const old = before.get(info.sandbox_id);
        const share = old && old.last.time === info.usage.time ? old.share : cpuShare(old?.last, info.usage);
        this._before.set(info.sandbox_id, { last: info.usage, share });
      }
    }
  }

  private async _poll(): Promise<void> {
    if (document.hidden) {
      return;
    }
    if ((this.isListed && Date.now() - this._looked > POLL_ALL) || (this.watched && this._infos.length < 20)) {
      await this.refresh();
    } else if (this.watched && this.find(this.watched)) {
      try {
        const own = await this.client.list({ kernel_id: this.watched });
        const ids = new Set(own.map(info => info.sandbox_id));
        this._take([...this._infos.filter(info => !ids.has(info.sandbox_id)), ...own]);
        this._changed.emit();
      } catch (error) {
        this.problem = (error as AgentboxError).message;
      }
    }
  }

  private _readSessions(): void {
    this._paths = new Map();
    for (const session of this.services.sessions.running()) {
      if (session.kernel) {
        this._paths.set(session.kernel.id, session.path);
      }
    }
    this._busy = new Set();
    for (const kernel of this.services.kernels.running()) {
      if (kernel.execution_state === 'busy') {
        this._busy.add(kernel.id);
      }
    }
  }

  private _onEvent(event: Record<string, string>): void {
    const schema = event['schema_id'] ?? '';
    const sandbox = event['sandbox'];
    if (!schema.startsWith(SCHEMA) || sandbox === undefined) {
      return;
    }
    const [kind] = schema.slice(SCHEMA.length).split('/');
    if (kind === 'egress') {
      this._refused.emit({ sandbox, host: event['host'] ?? '', port: Number(event['port']), reason: event['reason'] ?? '' });
    } else if (kind === 'lifecycle') {
      const { kernel_id: kernel = '', cause = '', message = '', setting = '' } = event;
      if (event['event'] === 'notice') {
        this._noticed.emit({ sandbox, message, setting });
      }
      if (event['event'] === 'ended' && kernel) {
        const ending = { kernel, sandbox, cause, message, setting, time: Date.now() / 1000 };
        const isAwaited = this.endings.get(kernel)?.sandbox === '';
        this._note(!MEANT.has(cause) || isAwaited ? this.endings : this._stops, ending);
      }
    }
    if (event['event'] !== 'ended') {
      this._touched.emit(sandbox);
    }
    this.refreshSoon();
  }
}

/** Make an ending whose cause no event has reported. */
function guess(kernel: string, cause: string): Ending {
  return { kernel, sandbox: '', cause, message: '', setting: '', time: Date.now() / 1000 };
}
