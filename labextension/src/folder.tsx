/** The notice above a notebook whose folder cannot be used, so that its kernel has a private one. */
import { ReactWidget } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Contents } from '@jupyterlab/services';
import * as React from 'react';

import type { Actions } from './actions.js';
import type { Model } from './model.js';
import type { Info } from './words.js';

/** Number of file names to try if the folder already has a notebook of the same name. */
const NAMES = 20;

export class FolderNotice extends ReactWidget {
  /** Kernel whose notice the user dismissed. */
  private _dismissed = '';
  private _isMoving = false;

  constructor(
    private readonly model: Model,
    private readonly actions: Actions,
    private readonly panel: NotebookPanel
  ) {
    super();
    this.addClass('ab-notice-box');
    this.node.setAttribute('role', 'status');
    this.hide();
    model.changed.connect(this._look, this);
    panel.sessionContext.kernelChanged.connect(this._look, this);
  }

  private get _info(): Info | undefined {
    const kernel = this.panel.sessionContext.session?.kernel?.id;
    const info = this.model.find(kernel);
    return info?.workspace_notice && kernel !== this._dismissed ? info : undefined;
  }

  private _look(): void {
    this.setHidden(this._info === undefined);
    this.update();
  }

  /** Move the notebook to a folder of its own, and start a kernel there. */
  private async _move(name: string): Promise<void> {
    const { contents } = this.model.services;
    const { context, sessionContext } = this.panel;
    const folder = PathExt.join(PathExt.dirname(context.path), name);
    this._isMoving = true;
    this.update();
    try {
      await context.save();
      await makeFolder(contents, folder);
      const path = await moveFile(contents, context.path, folder);
      // The kernel starts in the folder of the session's path, which the document sends without waiting.
      await sessionContext.session?.setPath(path);
      await sessionContext.changeKernel({ name: sessionContext.session?.kernel?.name ?? sessionContext.kernelPreference.name ?? '' });
    } catch (error) {
      this.actions.showError(error);
    }
    this._isMoving = false;
    this._look();
  }

  protected override render(): JSX.Element {
    const info = this._info;
    if (info === undefined) {
      return <></>;
    }
    const { trans } = this.model;
    const folder = info.suggested_folder;
    return (
      <div className="ab-notice">
        <p>
          <strong>{trans.__('This kernel cannot see the files beside the notebook. Its folder is private and is deleted with the kernel.')}</strong>{' '}
          {info.workspace_notice}
        </p>
        {folder && (
          <button type="button" className="ab-button" disabled={this._isMoving} onClick={() => void this._move(folder)}>
            {trans.__('Move Notebook to “%1”', folder)}
          </button>
        )}
        <button
          type="button"
          className="ab-button"
          onClick={() => {
            this._dismissed = this.panel.sessionContext.session?.kernel?.id ?? '';
            this._look();
          }}
        >
          {trans.__('Dismiss')}
        </button>
      </div>
    );
  }
}

/** Create a folder if it does not exist. */
async function makeFolder(contents: Contents.IManager, path: string): Promise<void> {
  const existing = await contents.get(path, { content: false }).catch(() => undefined);
  if (existing === undefined) {
    await contents.save(path, { type: 'directory' });
  }
}

/** Move a file into a folder, under a free name. Returns its new path. */
async function moveFile(contents: Contents.IManager, path: string, folder: string): Promise<string> {
  const extension = PathExt.extname(path);
  const stem = PathExt.basename(path, extension);
  for (let number = 0; number < NAMES; number++) {
    const target = PathExt.join(folder, number === 0 ? `${stem}${extension}` : `${stem}-${number}${extension}`);
    const existing = await contents.get(target, { content: false }).catch(() => undefined);
    if (existing === undefined) {
      await contents.rename(path, target);
      return target;
    }
  }
  throw new Error(`${folder} already has ${NAMES} notebooks of this name`);
}
