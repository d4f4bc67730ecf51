/** The JupyterLab plugin: adds the views, commands, launcher tiles and settings for sandboxes. */
import { ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, MainAreaWidget, Notification } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { Terminal } from '@jupyterlab/terminal';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { DisposableSet, type IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';
import type { Widget } from '@lumino/widgets';

import { Actions, type ActionName, type Tab } from './actions.js';
import { Banner } from './banner.js';
import { TurnDialogs } from './dialogs.js';
import { FolderNotice } from './folder.js';
import { boxedIcon } from './icons.js';
import { Indicator, see, type Seen } from './indicator.js';
import { Model } from './model.js';
import { SandboxPanel } from './panel.js';
import { Notices } from './reach.js';
import { SandboxTerminal } from './terminal.js';
import { SandboxView } from './view.js';
import { formatNotice, idOf, type Info } from './words.js';

const ID = 'jupyter-agentbox:plugin';
/** Width in pixels below which a view opens as a tab instead of to the right. */
const NARROW = 1000;

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Adds views and commands for the sandboxes of kernels and agents.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ITranslator, ICommandPalette, ILauncher, IStatusBar, ISettingRegistry, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    launcher: ILauncher | null,
    statusBar: IStatusBar | null,
    registry: ISettingRegistry | null,
    restorer: ILayoutRestorer | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_agentbox');
    const model = new Model(app.serviceManager, trans);
    const actions = new Actions(app, model);
    const wanted = { statusBar: true, toolbar: true, notices: true };
    const onSettings: (() => void)[] = [];
    if (registry) {
      registry.load(ID).then(
        settings => {
          const read = (): void => {
            for (const name of ['statusBar', 'toolbar', 'notices'] as const) {
              wanted[name] = settings.get(name).composite !== false;
            }
            for (const callback of onSettings) {
              callback();
            }
          };
          settings.changed.connect(read);
          read();
        },
        (error: unknown) => {
          Notification.warning(trans.__('Cannot load the Sandboxes settings: %1', String(error)));
        }
      );
    }

    // -- views --------------------------------------------------------------------------------
    /** The sandbox of each view and terminal of this extension. */
    const shownIn = new WeakMap<Widget, Info>();
    const views = new Map<string, { widget: MainAreaWidget<SandboxView>; view: SandboxView }>();
    actions.showView = (info: Info, tab: Tab): void => {
      const key = idOf(info);
      let found = views.get(key);
      if (!found) {
        const view = new SandboxView(model, actions, info);
        const widget = new MainAreaWidget({ content: view });
        widget.id = `jupyter-agentbox-view-${key}`;
        widget.title.label = trans.__('Sandbox: %1', actions.name(info));
        widget.title.icon = boxedIcon;
        widget.title.closable = true;
        widget.disposed.connect(() => {
          views.delete(key);
        });
        views.set(key, (found = { widget, view }));
        shownIn.set(widget, info);
      }
      found.view.showTab(tab);
      if (!found.widget.isAttached) {
        // A narrow window has no room for two columns.
        app.shell.add(found.widget, 'main', { mode: app.shell.node.clientWidth < NARROW ? 'tab-after' : 'split-right' });
      }
      app.shell.activateById(found.widget.id);
    };
    actions.showTerminal = (info: Info, name: string): void => {
      const connection = new SandboxTerminal(model, idOf(info), name);
      const content = new Terminal(connection, { theme: 'inherit', shutdownOnClose: true }, translator ?? nullTranslator);
      const widget = new MainAreaWidget({ content, reveal: content.ready });
      shownIn.set(widget, info);
      widget.id = `jupyter-agentbox-terminal-${info.sandbox_id ?? info.id}-${name}`;
      content.title.icon = boxedIcon;
      content.title.closable = true;
      const title = trans.__('Sandbox Terminal: %1', actions.name(info));
      content.title.label = title;
      // The terminal widget sets its own label once it is ready.
      content.title.changed.connect(() => {
        if (content.title.label !== title) {
          content.title.label = title;
        }
      });
      app.shell.add(widget, 'main', { mode: 'split-bottom' });
      app.shell.activateById(widget.id);
    };
    const panel = new SandboxPanel(model, actions);
    app.shell.add(panel, 'left', { rank: 350, type: 'Sandboxes' });
    restorer?.add(panel, panel.id);
    new Notices(model, actions, () => wanted.notices);
    model.noticed.connect((_, { sandbox, message, setting }) => {
      const info = model.find(sandbox);
      if (info && wanted.notices) {
        const show = { label: trans.__('Show'), callback: () => void actions.run('details', info) };
        Notification.warning(formatNotice(actions.name(info), message, setting, trans), { autoClose: false, actions: [show] });
      }
    });

    // -- of a notebook ------------------------------------------------------------------------
    const open = (info: Info): void => {
      actions.showView(info, 'reach');
    };
    const services = {
      dialogs: new TurnDialogs(),
      notify: (notebook: NotebookPanel, sentence: string): void => {
        const show = (): void => {
          app.shell.activateById(notebook.id);
        };
        Notification.error(`${notebook.title.label}: ${sentence}`, { autoClose: false, actions: [{ label: trans.__('Show'), callback: show }] });
      }
    };
    app.docRegistry.addWidgetExtension('Notebook', {
      createNew(notebook: NotebookPanel): IDisposable {
        const item = new Indicator(model, () => see(model, notebook), open, true);
        const look = (): void => {
          item.setHidden(!wanted.toolbar);
        };
        onSettings.push(look);
        look();
        notebook.toolbar.insertItem(10, 'agentbox', item);
        const banner = new Banner(model, notebook, services);
        notebook.contentHeader.addWidget(banner);
        const folderNotice = new FolderNotice(model, actions, notebook);
        notebook.contentHeader.addWidget(folderNotice);
        notebook.sessionContext.kernelChanged.connect(() => {
          item.update();
          model.refreshSoon();
          watch();
        });
        notebook.sessionContext.statusChanged.connect((_sender, status) => {
          if (status === 'busy' || status === 'idle') {
            model.refreshSoon();
          }
        });
        const all = DisposableSet.from([item, banner, folderNotice]);
        notebook.disposed.connect(() => {
          onSettings.splice(onSettings.indexOf(look), 1);
        });
        return all;
      }
    });
    const watch = (): void => {
      const kernel = tracker.currentWidget?.sessionContext.session?.kernel?.id ?? null;
      if (kernel !== model.watched) {
        model.watched = kernel;
        model.refreshSoon();
      }
    };
    tracker.currentChanged.connect(watch);
    if (statusBar) {
      const seeCurrent = (): Seen | null => {
        const { currentWidget } = app.shell;
        if (currentWidget && currentWidget === tracker.currentWidget) {
          return see(model, tracker.currentWidget);
        }
        const shown = currentWidget ? shownIn.get(currentWidget) : undefined;
        const info = shown ? model.find(idOf(shown)) : undefined;
        return info ? { isBoxed: true, info } : null;
      };
      const item = new Indicator(model, seeCurrent, open, false);
      tracker.currentChanged.connect(() => {
        item.update();
      });
      (app.shell.currentChanged ?? tracker.currentChanged).connect(() => {
        item.update();
      });
      const activeStateChanged = new Signal<typeof item, void>(item);
      statusBar.registerStatusItem('jupyter-agentbox:status', { item, align: 'left', rank: 20, isActive: () => wanted.statusBar, activeStateChanged });
      onSettings.push(() => {
        activeStateChanged.emit();
      });
    }

    // -- commands -----------------------------------------------------------------------------
    const category = trans.__('Sandboxes');
    const current = (): Info | undefined => model.find(tracker.currentWidget?.sessionContext.session?.kernel?.id);
    app.commands.addCommand('agentbox:show', {
      label: trans.__('Show Sandboxes'),
      caption: trans.__('Show all sandboxes of notebooks and agents'),
      execute: () => {
        app.shell.activateById(panel.id);
        panel.node.querySelector<HTMLElement>('input')?.focus();
      }
    });
    const ofNotebook: [string, ActionName, string][] = [
      ['agentbox:details', 'details', trans.__('Show Sandbox of Notebook')],
      ['agentbox:snapshot', 'snapshot', trans.__('Take Snapshot of Kernel…')],
      ['agentbox:undo', 'restore', trans.__('Restore Kernel from Snapshot…')],
      ['agentbox:fork', 'fork', trans.__('Fork Kernel into New Notebook')],
      ['agentbox:terminal', 'terminal', trans.__('Open Terminal in Sandbox')],
      ['agentbox:files', 'files', trans.__('Show Sandbox Files')]
    ];
    for (const [command, action, label] of ofNotebook) {
      app.commands.addCommand(command, {
        label,
        isEnabled: () => current() !== undefined,
        execute: async () => {
          const info = current();
          if (info) {
            await actions.run(action, info);
          }
        }
      });
    }
    model.changed.connect(() => {
      app.commands.notifyCommandChanged();
    });
    app.commands.addCommand('agentbox:new-notebook', {
      label: args => {
        const name = String(args['kernelName']);
        const image = model.stanza(name)?.['image'];
        const label = app.serviceManager.kernelspecs.specs?.kernelspecs[name]?.display_name ?? trans.__('Sandboxed Notebook');
        return typeof image === 'string' ? `${label} · ${image}` : label;
      },
      caption: args => {
        const stanza = model.stanza(String(args['kernelName'])) ?? {};
        const properties = ['image', 'profile', 'memory'].map(name => stanza[name]).filter(value => typeof value === 'string');
        return [trans.__('Create a notebook with a sandboxed kernel'), ...properties].join(' · ');
      },
      icon: boxedIcon,
      execute: args => app.commands.execute('notebook:create-new', { ...args })
    });
    for (const command of ['agentbox:show', ...ofNotebook.map(([name]) => name)]) {
      palette?.addItem({ command, category });
    }

    // -- launcher -----------------------------------------------------------------------------
    if (launcher) {
      let tiles = new DisposableSet();
      const specs = app.serviceManager.kernelspecs;
      const fill = (): void => {
        tiles.dispose();
        tiles = new DisposableSet();
        for (const kernelName of Object.keys(specs.specs?.kernelspecs ?? {})) {
          if (model.mode !== 'absent' && model.isBoxedSpec(kernelName)) {
            tiles.add(launcher.add({ command: 'agentbox:new-notebook', category, rank: 0, args: { kernelName } }));
          }
        }
      };
      specs.specsChanged.connect(fill);
      void specs.ready.then(fill);
    }
  }
};

export default plugin;
