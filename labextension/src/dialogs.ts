/** Closes JupyterLab's own dialogs about a dead kernel, where the banner explains the cause. */
import { Dialog } from '@jupyterlab/apputils';

/** Tracks dialogs opened in the current turn of the event loop by other listeners of the same signal. */
export class TurnDialogs {
  private _made: Dialog<unknown>[] = [];

  constructor() {
    Dialog.tracker.widgetAdded.connect((_, dialog) => {
      this._made.push(dialog);
      queueMicrotask(() => {
        this._made = [];
      });
    });
  }

  /** Dismiss these dialogs before they become visible. */
  close(): void {
    for (const dialog of this._made.splice(0)) {
      dialog.reject();
    }
  }
}
