/** JupyterLab's own dialogs about a kernel's end, which know no cause: taken away where the banner says more. */
import { Dialog } from '@jupyterlab/apputils';

/** Knows the dialogs that were made in the present turn of the event loop, by others who hear of the same thing. */
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

  /** Answer them before they are seen, as one who closes them would. */
  close(): void {
    for (const dialog of this._made.splice(0)) {
      dialog.reject();
    }
  }
}
