/** Above a notebook: why its kernel is no more, and what to do. */
import { Notification, ReactWidget } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import * as React from 'react';

import type { TurnDialogs } from './dialogs.js';
import type { Model } from './model.js';
import { explain, factsOf, type Ending } from './words.js';

/** Statuses of a kernel that lives. */
const LIVING = new Set(['idle', 'busy']);

/** Causes of an end after which the files of a private workspace are kept. */
const FAULTS = new Set(['out_of_memory', 'disk_full', 'crashed', 'killed', 'exited', 'runtime_failed']);

/** How often the server is asked whether files are kept, and the milliseconds between. */
const ASKS = 8;
const ASK_INTERVAL = 1000;

/** What the banner asks of the plugin. */
export interface Surroundings {
  dialogs: TurnDialogs;
  /** Tell of it where the notebook, and with it the banner, is out of sight. */
  tell: (panel: NotebookPanel, sentence: string) => void;
}

export class Banner extends ReactWidget {
  private _kernel = '';
  private _name = '';
  private _hasLived = false;
  /** Since when the server has been away, in seconds since the epoch. */
  private _awaySince: number | null = null;
  private _told: Ending | undefined;
  /** The ending whose kernel's files are kept, so that it can be revived with them. */
  private _revivable: Ending | undefined;
  private _asked: Ending | undefined;

  constructor(
    private readonly model: Model,
    private readonly panel: NotebookPanel,
    private readonly surroundings: Surroundings
  ) {
    super();
    this.addClass('ab-banner-box');
    this.node.setAttribute('role', 'alert');
    this.hide();
    const { sessionContext } = panel;
    this._kernel = sessionContext.session?.kernel?.id ?? '';
    this._name = sessionContext.session?.kernel?.name ?? '';
    model.changed.connect(() => {
      this._look();
    }, this);
    sessionContext.kernelChanged.connect((_, { newValue }) => {
      if (newValue) {
        this._kernel = newValue.id;
        this._name = newValue.name;
        this._hasLived = false;
        this._awaySince = null;
      } else {
        this._lost();
      }
      this._look();
    }, this);
    sessionContext.connectionStatusChanged.connect((_, status) => {
      if (status === 'connected') {
        this._awaySince = null;
      } else if (status === 'connecting') {
        this._awaySince ??= Date.now() / 1000;
      }
    }, this);
    sessionContext.statusChanged.connect((_, status) => {
      if (status === 'autorestarting' && this._isBoxed()) {
        surroundings.dialogs.close();
        model.noteDeath(this._kernel);
      } else if (status === 'dead') {
        this._lost();
      } else if (status === 'terminating') {
        this._hasLived = false; // whoever sits here shuts it down
      } else if (LIVING.has(status) && !sessionContext.isTerminating) {
        // A kernel that is shut down may say that it is busy with that.
        this._hasLived = true;
        this._look();
      }
    }, this);
  }

  private _isBoxed(): boolean {
    return this.model.mode === 'here' && this.model.isBoxedSpec(this._name);
  }

  /** The kernel is gone, and Jupyter starts none in its place. */
  private _lost(): void {
    if (this._hasLived && this._isBoxed()) {
      this._hasLived = false;
      this.surroundings.dialogs.close();
      void this.model.noteLoss(this._kernel, this._awaySince ?? Date.now() / 1000, this._awaySince !== null);
    }
  }

  private async _start(): Promise<void> {
    // The session may have ended with its kernel, which this page learns of in its turn only.
    await this.model.services.sessions.refreshRunning();
    await this.panel.sessionContext.changeKernel({ name: this._name });
  }

  /** Start the kernel again under its old id, with the files of its private workspace. */
  private async _revive(): Promise<void> {
    const id = this._kernel;
    try {
      // First, while the server has no such kernel: the page would take the new one for the one that it knows as dead.
      await this.model.services.sessions.refreshRunning();
      await this.model.client.call('revive_sandbox', { path: { id } });
    } catch (error) {
      this._revivable = undefined;
      this.update();
      Notification.error(error instanceof Error ? error.message : String(error), { autoClose: false });
      return;
    }
    await this.panel.sessionContext.changeKernel({ id });
    this.model.dismiss(id);
  }

  /** Ask whether the files of a kernel that is gone are kept, which takes the server a moment. */
  private async _ask(ending: Ending): Promise<void> {
    for (let left = ASKS; left > 0 && this._asked === ending; left--) {
      const info = await this.model.client.call('get_sandbox', { path: { id: ending.kernel } }).catch(() => undefined);
      if (typeof info?.end?.kept_until === 'number') {
        this._revivable = ending;
        this.update();
        return;
      }
      await new Promise(resolve => setTimeout(resolve, ASK_INTERVAL));
    }
  }

  private _look(): void {
    const ending = this.model.endings.get(this._kernel);
    this.setHidden(ending === undefined);
    this.update();
    if (ending && ending !== this._told && ending.sandbox !== '' && !this.panel.isVisible) {
      this.surroundings.tell(this.panel, explain(ending, this.model.trans).why);
    }
    this._told = ending;
    if (!ending) {
      this._asked = undefined;
    } else if (this._asked !== ending && FAULTS.has(ending.cause) && this._isGone()) {
      this._asked = ending;
      void this._ask(ending);
    }
  }

  private _isGone(): boolean {
    const kernel = this.panel.sessionContext.session?.kernel;
    return !kernel || kernel.status === 'dead';
  }

  protected override render(): JSX.Element {
    const ending = this.model.endings.get(this._kernel);
    if (ending === undefined) {
      return <></>;
    }
    const { trans } = this.model;
    const isGone = this._isGone();
    const { why, what } = explain(ending, trans);
    return (
      <div className="ab-banner">
        <p>
          <strong>{why}</strong> {ending.message && ending.cause !== 'stopped' && <span>– {factsOf(ending.message)}</span>}
          <br />
          {isGone ? trans.__('Its variables are gone with it.') : trans.__('A new kernel starts without your variables.')} {what}
        </p>
        {isGone && this._revivable === ending && (
          <button
            type="button"
            className="ab-button"
            onClick={() => {
              this._revive().catch(() => undefined); // JupyterLab tells of it
            }}
          >
            {trans.__('Start again with its files')}
          </button>
        )}
        {isGone && (
          <button
            type="button"
            className="ab-button"
            onClick={() => {
              this._start().catch(() => undefined); // JupyterLab tells of it
            }}
          >
            {trans.__('Start a new kernel')}
          </button>
        )}
        <button
          type="button"
          className="ab-button"
          onClick={() => {
            this.model.dismiss(ending.kernel);
          }}
        >
          {trans.__('Dismiss')}
        </button>
      </div>
    );
  }
}
