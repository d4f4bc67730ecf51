/** Above a notebook: why its kernel is no more, and what to do. */
import { ReactWidget } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import * as React from 'react';

import type { Model } from './model.js';
import { explain } from './words.js';

export class Banner extends ReactWidget {
  constructor(
    private readonly model: Model,
    private readonly panel: NotebookPanel
  ) {
    super();
    this.addClass('ab-banner-box');
    this.node.setAttribute('role', 'status');
    this.node.setAttribute('aria-live', 'polite');
    this.hide();
    const look = (): void => {
      this.setHidden(!this._ending());
      this.update();
    };
    model.changed.connect(look, this);
    panel.sessionContext.kernelChanged.connect(look, this);
  }

  private _ending(): ReturnType<Model['endings']['get']> {
    const kernel = this.panel.sessionContext.session?.kernel?.id;
    return kernel === undefined ? undefined : this.model.endings.get(kernel);
  }

  protected override render(): JSX.Element {
    const ending = this._ending();
    if (ending === undefined) {
      return <></>;
    }
    const { trans } = this.model;
    const { why, what } = explain(ending, trans);
    return (
      <div className="ab-banner">
        <p>
          <strong>{why}</strong> {ending.message && <span>– {ending.message}</span>}
          <br />
          {trans.__('A new kernel starts without your variables.')} {what}
        </p>
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
