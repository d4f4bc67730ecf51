/** The user's actions on a sandbox, shared by the side panel, the sandbox view, the command palette and notifications. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, InputDialog, Notification, showDialog } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import { KernelAPI } from '@jupyterlab/services';

import type { AgentboxError } from '../../clients/typescript/src/index.js';
import type { Model } from './model.js';
import { idOf, nameOf, type Info } from './words.js';

export type Tab = 'reach' | 'snapshots' | 'files' | 'activity';
export type ActionName = 'open' | 'details' | 'interrupt' | 'restart' | 'stop' | 'park' | 'wake' | 'snapshot' | 'restore' | 'fork' | 'terminal' | 'files';

export class Actions {
  /** Show the view of one sandbox. Set by the plugin. */
  showView: (info: Info, tab: Tab) => void = () => {};
  showTerminal: (info: Info, name: string) => void = () => {};

  constructor(
    readonly app: JupyterFrontEnd,
    readonly model: Model
  ) {}

  private get trans(): Model['trans'] {
    return this.model.trans;
  }

  name(info: Info): string {
    return nameOf(info, this.model.paths, this.trans);
  }

  /** Return the actions available in the sandbox's current state, each with a label and an optional tooltip. */
  of(info: Info): [ActionName, string, string?][] {
    const { trans } = this;
    const isNotebook = info.kind === 'notebook';
    const found: [ActionName, string, string?][] = [];
    const hasPath = info.kernels.some(kernel => this.model.paths.has(kernel.id));
    if (hasPath) {
      found.push(['open', trans.__('Open')]);
    }
    found.push(['details', trans.__('Details')]);
    if (info.state === 'running') {
      if (isNotebook || info.kernels.length > 0) {
        found.push(['interrupt', trans.__('Interrupt')], ['restart', trans.__('Restart')]);
      }
      found.push(['snapshot', trans.__('Snapshot')], ['restore', trans.__('Restore')]);
      found.push(['fork', trans.__('Fork'), isNotebook ? trans.__('Copy the notebook and continue from the current kernel state') : trans.__('Create a sandbox that continues from the current state')]);
      found.push(['terminal', trans.__('Terminal')], ['files', trans.__('Files')], ['park', trans.__('Park')]);
    } else if (info.state === 'parked') {
      found.push(['wake', trans.__('Wake')]);
    }
    found.push(['stop', info.state === 'ended' ? trans.__('Remove') : trans.__('Stop')]);
    return found;
  }

  /** Run an action and show a notification if it fails. */
  async run(action: ActionName, info: Info): Promise<void> {
    try {
      await this._run(action, info);
    } catch (error) {
      this.showError(error);
    }
    this.model.refreshSoon();
  }

  /** Show an error, with the setting that an administrator can change. */
  showError(error: unknown): void {
    const { message, setting } = error as AgentboxError;
    const hint = setting && !message.includes(setting) ? ' ' + this.trans.__('A server administrator can change this setting: %1.', setting) : '';
    Notification.error(message + hint, { autoClose: 10000 });
  }

  private async _run(action: ActionName, info: Info): Promise<void> {
    const { model, trans } = this;
    const kernel = info.kernels[0]?.id;
    const isNotebook = info.kind === 'notebook' && kernel !== undefined;
    const settings = model.services.serverSettings;
    const path = { id: idOf(info) };
    switch (action) {
      case 'open': {
        const notebook = info.kernels.map(item => model.paths.get(item.id)).find(item => item !== undefined);
        await this.app.commands.execute('docmanager:open', { path: notebook ?? '' });
        return;
      }
      case 'details':
        this.showView(info, 'reach');
        return;
      case 'files':
        this.showView(info, 'files');
        return;
      case 'restore':
        this.showView(info, 'snapshots');
        return;
      case 'interrupt':
        if (isNotebook) {
          await KernelAPI.interruptKernel(kernel, settings);
        } else {
          await Promise.all(info.kernels.map(item => model.client.call('interrupt_context', { path: { id: idOf(info), context: item.id } })));
        }
        return;
      case 'restart':
        if (await this.confirm(trans.__('Restart %1?', this.name(info)), trans.__('All variables will be lost.'), trans.__('Restart'))) {
          if (isNotebook) {
            await KernelAPI.restartKernel(kernel, settings);
          } else {
            await Promise.all(info.kernels.map(item => model.client.call('restart_context', { path: { id: idOf(info), context: item.id } })));
          }
        }
        return;
      case 'stop':
        if (
          info.state === 'ended' ||
          (await this.confirm(trans.__('Stop %1?', this.name(info)), trans.__('All variables and private files will be lost.'), trans.__('Stop')))
        ) {
          if (isNotebook) {
            await model.services.kernels.shutdown(kernel);
          } else {
            await model.client.call('delete_sandbox', { path });
          }
        }
        return;
      case 'park':
        await model.client.call('park_sandbox', { path });
        return;
      case 'wake':
        await model.client.call('wake_sandbox', { path });
        return;
      case 'snapshot':
        await this.snapshot(info);
        return;
      case 'fork':
        await this.fork(info);
        return;
      case 'terminal': {
        const process = await model.client.call('open_terminal', { path, body: {} });
        this.showTerminal(info, process.id);
        return;
      }
    }
  }

  async confirm(title: string, body: string, label: string): Promise<boolean> {
    const buttons = [Dialog.cancelButton({ label: this.trans.__('Cancel') }), Dialog.warnButton({ label })];
    return (await showDialog({ title, body, buttons, defaultButton: 0 })).button.accept;
  }

  /** Ask for a name and take a snapshot. Returns false if the user cancels. */
  async snapshot(info: Info): Promise<boolean> {
    const { trans } = this;
    const answer = await InputDialog.getText({
      title: trans.__('Take Snapshot of %1', this.name(info)),
      label: trans.__('Name'),
      okLabel: trans.__('Save'),
      pattern: '[^\\x00-\\x1f\\x7f]{0,100}'
    });
    if (!answer.button.accept) {
      return false;
    }
    const saving = this.model.client.call('take_snapshot', { path: { id: idOf(info) }, body: { name: answer.value ?? '' } });
    Notification.promise(saving, {
      pending: { message: trans.__('Saving snapshot…') },
      success: { message: () => trans.__('Snapshot saved. Open network connections are not included.'), options: { autoClose: 5000 } },
      error: { message: error => (error as Error).message }
    });
    await saving.catch(() => undefined);
    return true;
  }

  /** Fork a sandbox from its current state or from a snapshot. A notebook is copied and opened with the forked kernel. */
  async fork(info: Info, snapshot?: string): Promise<void> {
    const { model, trans } = this;
    const isNotebook = info.kind === 'notebook';
    const body = { ...(snapshot === undefined ? {} : { snapshot }), as_kernel: isNotebook };
    const made = await model.client.call('fork_sandbox', { path: { id: idOf(info) }, body });
    const kernel = made.kernels[0]?.id;
    if (!isNotebook || kernel === undefined) {
      this.showView(made, 'reach');
      return;
    }
    const source = info.kernels.map(item => model.paths.get(item.id)).find(item => item !== undefined);
    const contents = model.services.contents;
    const folder = source === undefined ? '' : PathExt.dirname(source);
    const copy =
      source === undefined ? await contents.newUntitled({ type: 'notebook', path: folder }) : await contents.copy(source, folder);
    const { name } = await KernelAPI.getKernelModel(kernel, model.services.serverSettings).then(found => ({ name: found?.name ?? '' }));
    await this.app.commands.execute('docmanager:open', { path: copy.path, factory: 'Notebook', kernel: { id: kernel, name } });
    Notification.success(trans.__('Fork created: %1. Its kernel has the variables of the original kernel.', copy.path), {
      autoClose: 5000
    });
  }
}
