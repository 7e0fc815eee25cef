-- How often a task had been requeued from the dead letters when it died this time. A later death replaces the row
-- of an earlier one, a good result removes it.
alter table fabric.dead_letters add column requeues smallint not null default 0;
create index dead_letters_by_code on fabric.dead_letters (error_code, task_id);
