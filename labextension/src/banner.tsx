/** Above a notebook: why its kernel is no more, and what to do. */
import { ReactWidget } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import * as React from 'react';

import type { TurnDialogs } from './dialogs.js';
import type { Model } from './model.js';
import { explain, factsOf, type Ending } from './words.js';

/** Statuses of a kernel that lives. */
const LIVING = new Set(['idle', 'busy']);

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

  private _look(): void {
    const ending = this.model.endings.get(this._kernel);
    this.setHidden(ending === undefined);
    this.update();
    if (ending && ending !== this._told && ending.sandbox !== '' && !this.panel.isVisible) {
      this.surroundings.tell(this.panel, explain(ending, this.model.trans).why);
    }
    this._told = ending;
  }

  protected override render(): JSX.Element {
    const ending = this.model.endings.get(this._kernel);
    if (ending === undefined) {
      return <></>;
    }
    const { trans } = this.model;
    const { sessionContext } = this.panel;
    const kernel = sessionContext.session?.kernel;
    const isGone = !kernel || kernel.status === 'dead';
    const { why, what } = explain(ending, trans);
    return (
      <div className="ab-banner">
        <p>
          <strong>{why}</strong> {ending.message && ending.cause !== 'stopped' && <span>– {factsOf(ending.message)}</span>}
          <br />
          {isGone ? trans.__('Its variables are gone with it.') : trans.__('A new kernel starts without your variables.')} {what}
        </p>
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
