/** Connects JupyterLab's terminal widget to a terminal in a sandbox, over the server extension's websocket. */
import { ServerConnection, type Terminal } from '@jupyterlab/services';
import { Signal, type ISignal } from '@lumino/signaling';

import type { Model } from './model.js';

/** Delay in milliseconds before a reconnect, and the maximum number of reconnects. */
const RETRY = 1000;
const MAX_RETRIES = 5;
/** Websocket close code for a failed network connection. */
const ABNORMAL = 1006;

export class SandboxTerminal implements Terminal.ITerminalConnection {
  readonly disposed = new Signal<this, void>(this);
  readonly messageReceived: ISignal<Terminal.ITerminalConnection, Terminal.IMessage>;
  private readonly _received = new Signal<Terminal.ITerminalConnection, Terminal.IMessage>(this);
  readonly connectionStatusChanged = new Signal<this, Terminal.ConnectionStatus>(this);
  readonly model: Terminal.IModel;
  readonly serverSettings: ServerConnection.ISettings;

  private readonly _within: string | null | undefined;
  private _socket: WebSocket | null = null;
  private _status: Terminal.ConnectionStatus = 'connecting';
  private _isDisposed = false;
  private _isOver = false;
  private _retries = 0;
  private readonly _encoder = new TextEncoder();
  private readonly _decoder = new TextDecoder();

  constructor(
    private readonly agentbox: Model,
    private readonly sandbox: string,
    readonly name: string
  ) {
    this.model = { name };
    this.messageReceived = this._received;
    this.serverSettings = agentbox.services.serverSettings;
    this._within = agentbox.find(sandbox)?.sandbox_id;
    this._connect();
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  get connectionStatus(): Terminal.ConnectionStatus {
    return this._status;
  }

  send(message: Terminal.IMessage): void {
    const [first, second] = message.content ?? [];
    if (this._socket?.readyState !== WebSocket.OPEN) {
      return;
    }
    if (message.type === 'stdin') {
      this._socket.send(this._encoder.encode(String(first)));
    } else if (message.type === 'set_size' && Number(first) > 0 && Number(second) > 0) {
      const within = (size: unknown): number => Math.min(1000, Math.round(Number(size)));
      this._socket.send(JSON.stringify({ rows: within(first), columns: within(second) }));
    }
  }

  reconnect(): Promise<void> {
    this._retries = 0;
    this._socket?.close();
    this._connect();
    return Promise.resolve();
  }

  async shutdown(): Promise<void> {
    const path = { id: this.sandbox, process: this.name };
    this.dispose();
    // The process or its sandbox may have ended already.
    await this.agentbox.client.call('remove_process', { path }).catch(() => undefined);
  }

  dispose(): void {
    if (!this._isDisposed) {
      this._isDisposed = true;
      this._socket?.close();
      this.disposed.emit();
      Signal.clearData(this);
    }
  }

  private _connect(): void {
    const { wsUrl, token } = this.serverSettings;
    const place = `api/agentbox/sandboxes/${encodeURIComponent(this.sandbox)}/terminals/${encodeURIComponent(this.name)}/socket`;
    // As JupyterLab's own websockets do. The server keeps tokens out of its log.
    const query = token && this.serverSettings.appendToken ? `?token=${encodeURIComponent(token)}` : '';
    const socket = (this._socket = new WebSocket(wsUrl + place + query));
    socket.binaryType = 'arraybuffer';
    this._setStatus('connecting');
    socket.onopen = () => {
      this._retries = 0;
      this._setStatus('connected');
    };
    socket.onmessage = (event: MessageEvent<ArrayBuffer | string>) => {
      if (typeof event.data === 'string') {
        this._isOver = true;
        this._received.emit({ type: 'disconnect', content: [] });
      } else {
        this._received.emit({ type: 'stdout', content: [this._decoder.decode(event.data, { stream: true })] });
      }
    };
    socket.onclose = event => {
      if (socket !== this._socket || this._isDisposed) {
        return;
      }
      this._setStatus('disconnected');
      // Reconnect only after a network failure, and below only to the same sandbox.
      this._isOver ||= event.code !== ABNORMAL;
      if (!this._isOver && this._retries < MAX_RETRIES) {
        this._retries += 1;
        setTimeout(() => {
          if (!this._isDisposed && socket === this._socket && this.agentbox.find(this.sandbox)?.sandbox_id === this._within) {
            this._connect();
          }
        }, RETRY * this._retries);
      }
    };
  }

  private _setStatus(status: Terminal.ConnectionStatus): void {
    if (status !== this._status) {
      this._status = status;
      this.connectionStatusChanged.emit(status);
    }
  }
}
