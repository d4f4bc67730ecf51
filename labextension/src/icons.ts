import { LabIcon } from '@jupyterlab/ui-components';

const SHIELD = 'M12 2 4 5v6c0 5 3.4 9.7 8 11 4.6-1.3 8-6 8-11V5z';

function make(name: string, inner: string): LabIcon {
  const svgstr = `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">${inner}</svg>`;
  return new LabIcon({ name: `jupyter-agentbox:${name}`, svgstr });
}

/** A filled shield with a tick: in a sandbox. */
export const boxedIcon = make(
  'boxed',
  `<path class="jp-icon3" fill="#616161" d="${SHIELD}"/><path fill="none" stroke="#fff" stroke-width="2.4" d="m7.8 12 3 3 5.4-6"/>`
);
/** An empty shield, struck through: not in one. */
export const unboxedIcon = make(
  'unboxed',
  `<path class="jp-icon3" style="fill:none" stroke="#616161" stroke-width="2" d="${SHIELD}"/>` +
    '<path class="jp-icon3" style="fill:none" stroke="#616161" stroke-width="2" d="M3 3l18 18"/>'
);
