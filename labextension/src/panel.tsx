/** The Sandboxes side panel: a list of all sandboxes with their actions. */
import { ReactWidget } from '@jupyterlab/apputils';
import type { Message } from '@lumino/messaging';
import * as React from 'react';

import type { Actions } from './actions.js';
import { Facts } from './facts.js';
import { useModel } from './hooks.js';
import { boxedIcon } from './icons.js';
import type { Model } from './model.js';
import { AllowedHosts } from './reach.js';
import { fits, formatAge, formatMemory, formatState, idOf, type Info } from './words.js';

/** Number of rows drawn at first, and added by each click on "Show More". Drawing hundreds makes every event slow. */
const PAGE = 100;

/** Return the seconds since the last use. For a notebook, kernel activity counts as use. */
function idleSince(model: Model, info: Info): number {
  let last = info.last_used;
  for (const kernel of model.services.kernels.running()) {
    if (kernel.last_activity && info.kernels.some(item => item.id === kernel.id)) {
      last = Math.max(last, Date.parse(kernel.last_activity) / 1000);
    }
  }
  return Date.now() / 1000 - last;
}

const Row = React.memo(function Row({
  info,
  name,
  model,
  actions,
  isOpen,
  onOpen
}: {
  info: Info;
  name: string;
  model: Model;
  actions: Actions;
  isOpen: boolean;
  onOpen: (key: string) => void;
}): JSX.Element {
  const { trans } = model;
  const facts = [
    formatState(info.state, trans),
    info.kind === 'notebook' ? trans.__('notebook') : trans.__('agent or program'),
    trans.__('created %1 ago', formatAge(Date.now() / 1000 - info.created, trans)),
    info.state === 'running' ? trans.__('idle for %1', formatAge(idleSince(model, info), trans)) : '',
    formatMemory(info, trans),
    info.isolation === 'gvisor' ? 'gVisor' : trans.__('not isolated by gVisor'),
    info.end?.message ?? ''
  ].filter(Boolean);
  return (
    <li className={`ab-row ab-mod-${info.state}`}>
      <button type="button" className="ab-row-head" aria-expanded={isOpen} title={name} onClick={() => {
        onOpen(idOf(info));
      }}>
        <span className="ab-row-text">
          <span className="ab-row-name">{name}</span>
          <Facts facts={facts} />
        </span>
      </button>
      {isOpen && (
        <div role="group" className="ab-row-actions" aria-label={trans.__('Actions for %1', name)}>
          {actions.of(info).map(([action, label, more]) => (
            <button
              type="button"
              className={action === 'stop' ? 'ab-button ab-mod-end' : 'ab-button'}
              title={more}
              key={action}
              onClick={() => {
                void actions.run(action, info);
              }}
            >
              {label}
            </button>
          ))}
        </div>
      )}
    </li>
  );
});

/** The message shown instead of the list where sandboxes are unavailable. */
export function Elsewhere({ model }: { model: Model }): JSX.Element {
  const { trans } = model;
  const text = {
    here: '',
    gateway: trans.__('This server runs its kernels on the gateway %1. Their sandboxes are managed there.', model.note),
    failed: trans.__('Sandboxes are unavailable because the server configuration is invalid: %1', model.note),
    absent: trans.__(
      'Sandboxes are unavailable because jupyter_agentbox is not installed on this server, or its server extension is disabled. Contact the server administrator.'
    )
  }[model.mode];
  return (
    <p role="note" className="ab-note">
      {text}
    </p>
  );
}

function List({ model, actions }: { model: Model; actions: Actions }): JSX.Element {
  useModel(model);
  const [filter, setFilter] = React.useState('');
  const [open, setOpen] = React.useState<string | null>(null);
  const [most, setMost] = React.useState(PAGE);
  const toggle = React.useCallback((key: string) => {
    setOpen(old => (old === key ? null : key));
  }, []);
  const list = React.useRef<HTMLUListElement>(null);
  const { trans } = model;
  if (model.mode !== 'here') {
    return <Elsewhere model={model} />;
  }
  const rows = model.infos
    .map(info => ({ info, name: actions.name(info) }))
    .filter(({ info, name }) => fits(info, name, filter))
    .reverse();

  const move = (event: React.KeyboardEvent): void => {
    const heads = [...(list.current?.querySelectorAll<HTMLElement>('.ab-row-head') ?? [])];
    const at = heads.findIndex(head => head.parentElement?.contains(document.activeElement));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: heads.length - 1 }[event.key];
    if (to === undefined) {
      return;
    }
    event.preventDefault();
    heads[Math.max(0, Math.min(heads.length - 1, to))]?.focus();
  };

  return (
    <div className="ab-list" onKeyDown={move}>
      <div className="ab-list-head">
        <input
          type="search"
          className="ab-input"
          aria-label={trans.__('Filter sandboxes')}
          placeholder={trans.__('Filter')}
          value={filter}
          onKeyDown={event => {
            if (event.key !== 'ArrowDown') {
              event.stopPropagation();
            }
          }}
          onChange={event => {
            setFilter(event.target.value);
            setMost(PAGE);
          }}
        />
        <button
          type="button"
          className="ab-button"
          onClick={() => {
            void model.refresh();
          }}
        >
          {trans.__('Refresh')}
        </button>
      </div>
      <p className="ab-count" role="status">
        {model.problem || trans._n('%1 sandbox', '%1 sandboxes', rows.length)}
      </p>
      <ul ref={list} className="ab-rows" aria-label={trans.__('Sandboxes')}>
        {rows.slice(0, most).map(({ info, name }) => {
          const key = idOf(info);
          return (
            <Row
              key={key}
              info={info}
              name={name}
              model={model}
              actions={actions}
              isOpen={open === key}
              onOpen={toggle}
            />
          );
        })}
      </ul>
      {rows.length > most && (
        <button
          type="button"
          className="ab-button ab-mod-more"
          onClick={() => {
            setMost(most + PAGE);
          }}
        >
          {trans._n('Show %1 More', 'Show %1 More', rows.length - most)}
        </button>
      )}
      <AllowedHosts model={model} actions={actions} />
    </div>
  );
}

export class SandboxPanel extends ReactWidget {
  constructor(
    private readonly model: Model,
    private readonly actions: Actions
  ) {
    super();
    this.id = 'jupyter-agentbox-sandboxes';
    this.addClass('ab-panel');
    this.title.icon = boxedIcon;
    this.title.caption = model.trans.__('Sandboxes');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', model.trans.__('Sandboxes'));
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.model.isListed = true;
    void this.model.refresh();
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.model.isListed = false;
  }

  protected override render(): JSX.Element {
    return <List model={this.model} actions={this.actions} />;
  }
}
