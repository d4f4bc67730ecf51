/** The banner above a notebook that explains why its kernel ended and what the user can do. */
import { Notification, ReactWidget } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import * as React from 'react';

import type { TurnDialogs } from './dialogs.js';
import type { Model } from './model.js';
import { explain, factsOf, recipeOf, type Ending } from './words.js';

/** Statuses of a living kernel. */
const LIVING = new Set(['idle', 'busy']);

/** Causes after which the server keeps the files of a private workspace. */
const FAULTS = new Set(['out_of_memory', 'disk_full', 'crashed', 'killed', 'exited', 'runtime_failed']);

/** Number of requests that check whether files are kept, and the interval between them in milliseconds. */
const ASKS = 8;
const ASK_INTERVAL = 1000;

/** Services that the plugin provides to the banner. */
export interface Services {
  dialogs: TurnDialogs;
  /** Show a notification, for use when the notebook and its banner are not visible. */
  notify: (panel: NotebookPanel, sentence: string) => void;
}

export class Banner extends ReactWidget {
  private _kernel = '';
  private _name = '';
  private _hasLived = false;
  /** When the connection to the server was lost, in seconds since the epoch. */
  private _awaySince: number | null = null;
  private _notified: Ending | undefined;
  /** The ending of a kernel whose files are kept, so that it can be restarted with them. */
  private _revivable: Ending | undefined;
  private _asked: Ending | undefined;

  constructor(
    private readonly model: Model,
    private readonly panel: NotebookPanel,
    private readonly services: Services
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
        services.dialogs.close();
        model.noteDeath(this._kernel);
      } else if (status === 'dead') {
        this._lost();
      } else if (status === 'terminating') {
        this._hasLived = false; // the user of this page shuts it down
      } else if (LIVING.has(status) && !sessionContext.isTerminating) {
        // A kernel can report that it is busy while it shuts down.
        this._hasLived = true;
        this._look();
      }
    }, this);
  }

  private _isBoxed(): boolean {
    return this.model.mode === 'here' && this.model.isBoxedSpec(this._name);
  }

  /** Handle a kernel that ended and that Jupyter does not restart. */
  private _lost(): void {
    if (this._hasLived && this._isBoxed()) {
      this._hasLived = false;
      this.services.dialogs.close();
      void this.model.noteLoss(this._kernel, this._awaySince ?? Date.now() / 1000, this._awaySince !== null);
    }
  }

  private async _start(): Promise<void> {
    // The session may have ended with its kernel; this page learns that only at its next poll.
    await this.model.services.sessions.refreshRunning();
    await this.panel.sessionContext.changeKernel({ name: this._name });
  }

  /** Restart the kernel under its old id, with the files of its private workspace. */
  private async _revive(): Promise<void> {
    const id = this._kernel;
    try {
      // Refresh before the server has the kernel again: otherwise the page mistakes the new kernel for the dead one.
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

  /** Poll whether the files of an ended kernel are kept. The server needs a moment to decide. */
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
    if (ending && ending !== this._notified && ending.sandbox !== '' && !this.panel.isVisible) {
      this.services.notify(this.panel, explain(ending, this.model.trans).why);
    }
    this._notified = ending;
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
    const { settingsFile } = this.model;
    const profile = this.model.find(ending.kernel)?.profile ?? this.model.stanza(this._name)?.['profile'];
    // A limit that the kernelspec requests itself is raised there.
    const isOwn = ['memory', 'disk'].some(key => this.model.stanza(this._name)?.[key] !== undefined);
    const recipe = settingsFile && !isOwn ? recipeOf(ending, typeof profile === 'string' ? profile : 'default') : '';
    return (
      <div className="ab-banner">
        <div>
          <p>
            <strong>{why}</strong> {ending.message && ending.cause !== 'stopped' && <span>– {factsOf(ending.message)}</span>}
            <br />
            {isGone ? trans.__('All variables are lost.') : trans.__('A new kernel is starting without your variables.')} {what}
          </p>
          {recipe && (
            <div className="ab-recipe">
              <p>{trans.__('Add these lines to %1, and start the kernel again:', settingsFile)}</p>
              <pre>{recipe}</pre>
            </div>
          )}
        </div>
        {isGone && this._revivable === ending && (
          <button
            type="button"
            className="ab-button"
            onClick={() => {
              this._revive().catch(() => undefined); // JupyterLab shows the error
            }}
          >
            {trans.__('Restart with Files')}
          </button>
        )}
        {isGone && (
          <button
            type="button"
            className="ab-button"
            onClick={() => {
              this._start().catch(() => undefined); // JupyterLab shows the error
            }}
          >
            {trans.__('Start New Kernel')}
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
